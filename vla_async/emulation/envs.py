"""``EmulatedEnvs``: envs whose steps take a given time and next to no CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from vla_async.emulation.device import sleep_until
from vla_async.emulation.durations import Constant, Duration
from vla_async.envs.base import EnvFactory, SimStep, Simulator
from vla_async.rng import episode_seed, fold
from vla_async.shared_memory import numbers

_TASK = "emulated"
_NO_TIME = Constant()


class EmulatedSimulator(Simulator):
    """Rows whose state is (env steps of the episode, number of the env, 0, ...), and whose images count env steps too.

    The tensors that a step returns are the simulator's own and change with its next step. Step times come from a random
    stream of the episode, a function of its seed and of the env's number alone. A step of a batch is one draw, from the
    stream of the row that was reset last.
    """

    def __init__(self, factory: EmulatedEnvs, index: int, num_rows: int) -> None:
        self.factory, self.num_rows, self._index = factory, num_rows, index
        self.action_low, self.action_high = (-1.0,) * factory.action_dim, (1.0,) * factory.action_dim
        state = torch.zeros(num_rows, factory.state_dim)
        if factory.state_dim > 1:
            state[:, 1] = torch.arange(index, index + num_rows)
        size = factory.image_size
        images = {name: torch.zeros(num_rows, 3, size, size, dtype=torch.uint8) for name in factory.image_names}
        self._observation = {"state": state, **images}
        # memory costs less than indexing a tensor, or an array; what an emulated env computes is no part of the emulation
        self._elapsed = numbers(state.numpy()[:, 0])
        self._pixels = [numbers(image.numpy()[:, 0, 0, 0]) for image in images.values()]
        self._result = SimStep(self._observation, torch.ones(num_rows), torch.zeros(num_rows, dtype=torch.bool))
        self._generator = np.random.default_rng(0)

    @property
    def instructions(self) -> Sequence[str]:
        return [_TASK] * self.num_rows

    @property
    def tasks(self) -> Sequence[str]:
        return [_TASK] * self.num_rows

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        deadline = time.perf_counter() + self.factory.reset_s
        for row in torch.nonzero(rows).flatten().tolist():
            self._elapsed[row] = 0.0
            key = fold(int(seeds[row]), "emulated step time", self._index + row)
            self._generator = np.random.default_rng(key % 2**64)
        self._show()
        sleep_until(deadline)
        return self._observation

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        deadline = time.perf_counter() + self.factory.step_time.draw(self._generator)
        for row, takes_part in enumerate(rows.tolist()):
            self._elapsed[row] += takes_part
        self._show()
        sleep_until(deadline)
        return self._result

    def _show(self) -> None:
        for pixels in self._pixels:
            for row, elapsed in enumerate(self._elapsed):
                pixels[row] = int(elapsed) % 256


@dataclass(kw_only=True)
class EmulatedEnvs(EnvFactory):
    """Envs that sleep: for measuring an engine, and for planning with the costs of a simulator that is not at hand.

    The reward is 1 per env step, nothing succeeds, and an episode ends at its horizon.

    Args:
        step_time: of one env step (of one step of the whole batch if ``batched``); none by default.
        reset_s: seconds that a reset takes.
        state_dim: length of the state.
        action_dim: A.
        cameras: number of uint8 images per observation: ``image``, ``camera_1``, ``camera_2`` and so on.
        image_size: height and width of each.
        batched: step all envs as rows of one simulator, as a GPU simulator does.
    """

    step_time: Duration = _NO_TIME
    reset_s: float = 0.0
    state_dim: int = 8
    action_dim: int = 7
    cameras: int = 0
    image_size: int = 224
    batched: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"state_dim": 1, "action_dim": 1, "cameras": 0, "image_size": 1, "reset_s": 0}.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"env.{name}={value} must be at least {least}")
        if not isinstance(self.step_time, Duration):
            raise ValueError(f"env.step_time={self.step_time!r} must be a Duration, for example Constant(0.01)")

    @property
    def task_names(self) -> list[str]:
        return [_TASK]

    @property
    def image_names(self) -> list[str]:
        """The names of the cameras in an observation."""
        return ["image", *(f"camera_{number}" for number in range(1, self.cameras))][: self.cameras]

    @property
    def observation_names(self) -> frozenset[str]:
        return frozenset(["state", *self.image_names])

    @property
    def is_batched(self) -> bool:
        return self.batched

    def make_simulator(self, index: int, render: bool = False) -> EmulatedSimulator:
        return EmulatedSimulator(self, index, self.num_envs if self.batched else 1)


class EmulatedEnvBase(EnvBase):
    """One row of a simulator as a TorchRL user would write an env by hand, to measure the generic way through an engine.

    It reads ``"action"`` ``[A]`` and shows the state as ``"observation"`` ``[state_dim]``; cameras keep their names.

    Args:
        simulator: what is stepped, of one row; closed by this env.
        max_episode_steps: the horizon in env steps.
    """

    def __init__(self, simulator: Simulator, max_episode_steps: int = 50) -> None:
        if simulator.num_rows != 1:
            raise ValueError(f"EmulatedEnvBase steps one row, but the simulator has {simulator.num_rows}")
        super().__init__()
        self.is_closed = False  # TorchRL takes an env for closed until it is told
        self.simulator, self.max_episode_steps = simulator, max_episode_steps
        self._row = torch.ones(1, dtype=torch.bool)
        self._seed, self._episodes, self._elapsed = 0, 0, 0
        first = simulator.reset(self._row, torch.zeros(1, dtype=torch.int64))
        self.observation_spec = Composite(
            {_leaf(name): Unbounded(tuple(value.shape[1:]), dtype=value.dtype) for name, value in first.items()}
        )
        self.action_spec = Bounded(torch.tensor(simulator.action_low), torch.tensor(simulator.action_high))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            {name: Binary(shape=(1,), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seed = episode_seed(self._seed, 0, self._episodes)
        self._episodes, self._elapsed = self._episodes + 1, 0
        first = self.simulator.reset(self._row, torch.tensor([seed]))
        return TensorDict({_leaf(name): value[0].clone() for name, value in first.items()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = self.simulator.step(tensordict["action"].unsqueeze(0), self._row)
        self._elapsed += 1
        over = torch.tensor([self._elapsed >= self.max_episode_steps])
        out = {_leaf(name): value[0].clone() for name, value in result.observation.items()}
        ends = {"done": over, "terminated": torch.zeros_like(over), "truncated": over.clone()}
        return TensorDict({**out, **ends, "reward": result.reward.clone()})

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._seed, self._episodes = int(seed), 0

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the simulator."""
        if not self.is_closed:
            self.simulator.close()
        super().close(raise_if_closed=raise_if_closed)


def _leaf(name: str) -> str:
    return "observation" if name == "state" else name
