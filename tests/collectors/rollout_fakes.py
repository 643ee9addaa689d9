"""Envs and policies that tell on a rollout engine: what they show says which env, episode, step and weights it came from.

They stand in a module of their own because env workers and replicas import them in processes of their own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, exploration_type

from tests.fakes import ClockEnvs, ClockSimulator, KnownPolicy
from vla_async import keys
from vla_async.collectors import StreamingCollector
from vla_async.collectors.board import SlotState


class CounterEnv(EnvBase):
    """Shows (its number, its episode, its step of the episode); the reward is the step plus the action.

    Args:
        number: of the env.
        horizon: steps of an episode.
        delay_s: seconds that a step takes.
        texts: show a text too, which names the step.
        terminates: the last step terminates the episode instead of truncating it.
    """

    def __init__(
        self, number: int = 0, horizon: int = 4, delay_s: float = 0.0, texts: bool = False, terminates: bool = False
    ) -> None:
        super().__init__()
        self.is_closed = False  # TorchRL takes an env for closed until it is told
        self.number, self.horizon, self.delay_s, self.texts, self.terminates = number, horizon, delay_s, texts, terminates
        self.episode, self.count = -1, 0
        spec: dict[str, Any] = {"observation": Unbounded((3,))}
        if texts:
            spec["caption"] = NonTensor(shape=(), example_data="0/0")
        self.observation_spec = Composite(spec)
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            {name: Binary(shape=(1,), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        )

    def _seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = {"observation": torch.tensor([self.number, self.episode, self.count], dtype=torch.float32)}
        return seen | ({"caption": f"{self.episode}/{self.count}"} if self.texts else {})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.episode, self.count = self.episode + 1, 0
        return TensorDict(self._seen())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(self.delay_s)
        self.count += 1
        over = torch.tensor([self.count >= self.horizon])
        no = torch.zeros_like(over)
        ends = {"terminated": over, "truncated": no} if self.terminates else {"terminated": no, "truncated": over}
        return TensorDict({**self._seen(), **ends, "done": over.clone(), "reward": tensordict["action"] + self.count})

    def _set_seed(self, seed: int | None) -> None:
        self.seeded = seed


class BatchedCounterEnv(EnvBase):
    """Rows whose episodes have different lengths; row r shows (r, its step), and its episodes take r + 2 steps."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__(batch_size=[rows])
        self.is_closed = False
        self.count = torch.zeros(rows, 1)
        self.observation_spec = Composite(observation=Unbounded((rows, 2)), shape=[rows])
        self.action_spec = Bounded(-1.0, 1.0, (rows, 1))
        self.reward_spec = Unbounded((rows, 1))
        flags = {name: Binary(shape=(rows, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=[rows])

    def _seen(self) -> Tensor:
        return torch.cat([torch.arange(len(self.count), dtype=torch.float32).unsqueeze(-1), self.count], dim=-1)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        which = torch.ones_like(self.count, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            which = tensordict["_reset"].reshape(-1, 1)
        self.count = torch.where(which, 0.0, self.count)
        return TensorDict({"observation": self._seen()}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        over = self.count == torch.arange(2, len(self.count) + 2).unsqueeze(-1)
        parts = {"observation": self._seen(), "reward": self.count.clone(), "terminated": over, "done": over.clone()}
        return TensorDict({**parts, "truncated": torch.zeros_like(over)}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


class TwoParameters(TensorDictModuleBase):
    """Its action shows the first and the last element of both of its parameters, the second read some time after the first.

    Args:
        pause_s: between reading them.
        size: of each.
    """

    def __init__(self, pause_s: float = 0.0, size: int = 1) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [keys.STATE], [keys.CHUNK]
        self.pause_s = pause_s
        self.first, self.second = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.first.fill_(value)
            self.second.fill_(value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        first = torch.stack([self.first[0], self.first[-1]])
        time.sleep(self.pause_s)
        chunk = torch.stack([first, torch.stack([self.second[0], self.second[-1]])])
        return tensordict.set(keys.CHUNK, chunk.detach().expand(*tensordict.batch_size, 2, 2).clone())


class Pusher(TensorDictModuleBase):
    """For :class:`CounterEnv`: acts with its only parameter, plus one where it explores."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.push = nn.Parameter(torch.zeros(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        explores = exploration_type() == ExplorationType.RANDOM
        action = self.push.detach() + self.offset + float(explores)
        return tensordict.set("action", action.expand(*tensordict.batch_size, 1).clone())


class Troubled(TensorDictModuleBase):
    """For :class:`CounterEnv`: waits while a file exists, and has trouble where an episode is some steps old.

    Args:
        trouble: ``raise``, ``nan`` or nothing.
        at: step of the episode.
        gate: the file.
    """

    def __init__(self, trouble: str = "", at: int = 2, gate: Path | None = None) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "log_prob"]
        self.trouble, self.at, self.gate = trouble, at, gate
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        while self.gate is not None and self.gate.exists():
            time.sleep(0.01)
        steps = tensordict["observation"][..., 2]
        hit = steps == self.at
        if self.trouble == "raise" and bool(hit.any()):
            raise ArithmeticError("the policy lost its mind")
        log_prob = torch.where(hit & (self.trouble == "nan"), float("nan"), 0.0)
        return tensordict.set("action", torch.zeros(*tensordict.batch_size, 1)).set("log_prob", log_prob)


class LateSimulator(ClockSimulator):
    """Breaks in a reset only when it has stepped."""

    def _fail(self, where: str) -> None:
        if where != "reset" or self._steps:
            super()._fail(where)


@dataclass(kw_only=True)
class OnceFaulty(ClockEnvs):
    """Break as :class:`ClockEnvs` do, but only until ``flag`` exists: whoever takes the env's place is well."""

    def make_simulator(self, index: int, render: bool = False) -> ClockSimulator:
        well = self.flag and Path(self.flag).exists()
        return LateSimulator(
            dataclasses.replace(self, fault="") if well else self, index, self.num_envs if self.batched else 1
        )


@contextmanager
def collecting(envs: Any, policy: Any = None, **options: Any) -> Iterator[StreamingCollector]:
    """A collector that is shut down at the end of the block."""
    collector = StreamingCollector(envs, policy, **options)
    try:
        yield collector
    finally:
        collector.shutdown(raise_on_error=False)


def take(collector: StreamingCollector, count: int) -> list[TensorDictBase]:
    """The next batches."""
    batches = []
    for batch in collector:
        batches.append(batch)
        if len(batches) == count:
            break
    return batches


def episodes(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """What was collected, by trajectory id, in the order in which it came."""
    flat = torch.cat([batch.reshape(-1) for batch in batches])
    ids = flat["collector", "traj_ids"]
    return {int(number): flat[ids == number] for number in ids.unique()}


class BlindAtTheEnd(KnownPolicy):
    """Gives a NaN as the value of an env step that episodes are truncated at, which it never has to decide on."""

    def act(self, td: TensorDictBase) -> TensorDictBase:
        td = super().act(td)
        return td.set(keys.VALUE, torch.where(td[keys.STATE][:, 1:2] == 5, float("nan"), td[keys.VALUE]))


def all_slots_wait(collector: StreamingCollector) -> bool:
    """Whether every slot is finished and waits for the consumer: so none is lost, and all envs wait for one."""
    return bool((collector.fleet.board.state >= SlotState.FINISHED).all())
