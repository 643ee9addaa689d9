"""``SingleRow`` steps one row in plain numbers: it must do to the last bit what ``FactoryRows`` does with arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vla_async import keys
from vla_async.collectors.groups import Grouping
from vla_async.collectors.row_env import FactoryRows
from vla_async.collectors.single_row import SingleRow
from vla_async.collectors.slab import Key
from vla_async.envs import ChunkedEnv, EnvFactory, SimStep, Simulator

FLOATS = st.floats(-3.0, 3.0, width=32)


class Scripted(Simulator):
    """Plays a script of (reward, success, failure), and shows the env step, its action and the seed of its episode.

    What it returns is its own memory, which its next step changes.
    """

    action_low, action_high = (-1.0, -0.5), (1.0, 2.0)

    def __init__(self, script: Sequence[tuple[float, bool, bool]], fails: bool) -> None:
        self.script, self.fails, self.played = script, fails, 0
        self.state, self.image = torch.zeros(1, 4), torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
        self.half = torch.zeros(1, 2, dtype=torch.bfloat16)
        self.reward, self.success, self.failure = torch.zeros(1), torch.zeros(1).bool(), torch.zeros(1).bool()

    @property
    def instructions(self) -> Sequence[str]:
        return [f"episode of seed {int(self.state[0, 3])}"]

    @property
    def tasks(self) -> Sequence[str]:
        return ["scripted"]

    def _seen(self) -> dict[str, Tensor]:
        return {"state": self.state, "image": self.image, "half": self.half}

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        self.state[0] = torch.tensor([0.0, 0.0, 0.0, float(seeds[0]) % 1000])
        return self._seen()

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        reward, success, failure = self.script[self.played % len(self.script)]
        self.played += 1
        self.state[0, 0] += 1
        self.state[0, 1:3] = action[0]
        self.image += 1
        self.half += 0.5
        self.reward[0], self.success[0], self.failure[0] = reward, success, failure
        return SimStep(self._seen(), self.reward, self.success, self.failure if self.fails else None)


@dataclass(kw_only=True)
class ScriptedEnvs(EnvFactory):
    """Envs that all play one script."""

    script: Sequence[tuple[float, bool, bool]]
    fails: bool

    @property
    def task_names(self) -> list[str]:
        return ["scripted"]

    def make_simulator(self, index: int, render: bool = False) -> Scripted:
        return Scripted(self.script, self.fails)


def equal(ours: dict[Any, Any], theirs: dict[Any, Any], where: str) -> None:
    """Same keys, shapes and values."""
    assert ours.keys() == theirs.keys(), where
    for key, value in ours.items():
        assert value.shape == theirs[key].shape, (where, key)
        np.testing.assert_array_equal(value, theirs[key], err_msg=f"{where}: {key}")


@settings(max_examples=60, deadline=None)
@example(  # whose sum depends on the order of its terms, and NumPy's on how many there are
    script=[(0.6000000238418579, False, True), (0.0, False, False), (-1.0, False, False), (2.0, False, False)],
    fails=True,
    chunk_size=10,
    spare=0,
    on_success="terminate",
    grouped=False,
    actions=[[0.0] * 20] * 2,
)
@given(
    script=st.lists(st.tuples(FLOATS, st.booleans(), st.integers(0, 4).map(lambda n: n == 0)), min_size=1, max_size=12),
    fails=st.booleans(),
    chunk_size=st.sampled_from([1, 2, 3, 10]),
    spare=st.integers(0, 5),
    on_success=st.sampled_from(["terminate", "finish_chunk", "continue"]),
    grouped=st.booleans(),
    actions=st.lists(st.lists(FLOATS, min_size=20, max_size=20), min_size=1, max_size=12),
)
def test_it_does_what_many_rows_do(
    script: list[tuple[float, bool, bool]],
    fails: bool,
    chunk_size: int,
    spare: int,
    on_success: Any,
    grouped: bool,
    actions: list[list[float]],
) -> None:
    """Else what an env gives would depend on how many rows its simulator has."""
    envs = ScriptedEnvs(
        script=script,
        fails=fails,
        chunk_size=chunk_size,
        max_episode_steps=chunk_size + spare,
        on_success=on_success,
        num_envs=2,
    )
    grouping = Grouping(2, 2, 1) if grouped else None
    single, many = SingleRow(envs.make(0), 40, grouping), FactoryRows(envs.make(0), 40, grouping)
    pair: list[FactoryRows] = [single, many]
    episodes = np.zeros(1, np.int64)
    for env in pair:
        env.start(7, range(1, 2), episodes)
    for number, elements in enumerate(actions):
        equal(single.current(), many.current(), f"before decision {number}")
        chunk: dict[Key, Tensor] = {keys.CHUNK: torch.tensor(elements[: 2 * chunk_size]).reshape(1, chunk_size, 2)}
        (ours, ended), (theirs, other_ended) = (env.step(chunk) for env in pair)
        equal(ours, theirs, f"decision {number}")
        assert ended.tolist() == other_ended.tolist()
        assert single.count(ours) == many.count(theirs) == single.executed
        if ended[0]:
            episodes += 1
            for env in pair:
                env.restart(ended, episodes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_action_that_is_not_finite_is_named(value: float) -> None:
    """A NaN would otherwise go into the simulator, and from there into everything."""
    env = SingleRow(ScriptedEnvs(script=[(0.0, False, False)], fails=False, chunk_size=3).make(0), 40)
    env.start(0, range(1), np.zeros(1, np.int64))
    chunk = torch.zeros(1, 3, 2)
    chunk[0, 2, 1] = value
    with pytest.raises(ValueError, match=r"at \[row, step, element\] \[0, 2, 1\] is not finite"):
        env.step({keys.CHUNK: chunk})


def test_it_suits_one_row_on_the_cpu_alone() -> None:
    """A batch of rows has more than one number to read, and a GPU's numbers are not in memory."""
    env: Any = ScriptedEnvs(script=[(0.0, False, False)], fails=False).make(0)
    assert SingleRow.suits(env)
    env.simulator.device = torch.device("meta")
    assert not SingleRow.suits(env)
    assert isinstance(env, ChunkedEnv)
    env.simulator.device, env.num_rows = torch.device("cpu"), 2
    assert not SingleRow.suits(env)
