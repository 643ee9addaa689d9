"""Envs and policies whose every number is known beforehand, for the tests of the run machinery.

They stand in a module of their own because env workers import them in processes of their own.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_async import keys
from vla_async.callbacks import Callback
from vla_async.envs import EnvFactory, EnvSpec, SimStep, Simulator
from vla_async.envs.controllers import ScriptedController
from vla_async.policies import TinyVLAPolicy, VLAPolicy
from vla_async.rng import normal
from vla_async.trainer import AsyncTrainer

ACTION_DIM = 2


class ClockSimulator(Simulator):
    """The state of a row is (seed % 997, env step of the episode, task, sum of all actions of the episode)."""

    def __init__(self, factory: ClockEnvs, index: int, num_rows: int) -> None:
        self.factory, self.num_rows, self.index = factory, num_rows, index
        self.action_low, self.action_high = (-1.0,) * ACTION_DIM, (1.0,) * ACTION_DIM
        self._task = torch.tensor([(index + row) % len(factory.names) for row in range(num_rows)])
        self._seeds, self._elapsed = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
        self._total = torch.zeros(num_rows)
        self._resets, self._steps = 0, 0

    @property
    def instructions(self) -> Sequence[str]:
        if self.factory.wordy:
            return [f"start from {seed}" for seed in self._seeds.tolist()]
        return [f"watch the {task}" for task in self.tasks]

    @property
    def tasks(self) -> Sequence[str]:
        return [self.factory.names[task] for task in self._task.tolist()]

    def _observation(self) -> dict[str, Tensor]:
        parts = [self._seeds % 997, self._elapsed, self._task, self._total]
        state = torch.stack([part.to(torch.float32) for part in parts], dim=-1)
        if self.factory.odd_env == self.index:
            state = torch.cat([state, state], dim=-1)
        if not self.factory.image:
            return {"state": state}
        image = (self._seeds % 251).to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4)
        return {"state": state, "image": image}

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        self._resets += 1
        if self._resets > 1:  # the first is made while the env is built
            self._fail("reset")
        self._seeds = torch.where(rows, seeds, self._seeds)
        self._elapsed, self._total = self._elapsed.masked_fill(rows, 0), self._total.masked_fill(rows, 0.0)
        return self._observation()

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        self._steps += 1
        if self._steps == self.factory.fault_step:
            self._fail("step")
        self._elapsed += rows
        self._total = torch.where(rows, self._total + action.sum(-1), self._total)
        reward = self._elapsed + 0.5 * self._total
        factory, since = self.factory, self._elapsed - self.factory.success_at
        success = (since >= 0) & (self._seeds % factory.success_every == 0) & (factory.success_at > 0)
        if factory.success_lasts:
            success &= since < factory.success_lasts
        failure = self._elapsed == factory.failure_at if factory.failure_at else None
        return SimStep(self._observation(), reward, success, failure)

    def _fail(self, where: str) -> None:
        if self.factory.fault_env != self.index or not self.factory.fault.endswith(where):
            return
        if self.factory.flag:
            Path(self.factory.flag).touch()
        if self.factory.fault.startswith("hang"):
            time.sleep(3600.0)
        if self.factory.fault.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(f"the clock of env {self.index} broke in {where}")

    def render(self) -> Tensor:
        return torch.full((17, 16, 3), min(int(self._elapsed[0]) * 10, 255), dtype=torch.uint8)  # 17: odd on purpose


@dataclass(kw_only=True)
class ClockEnvs(EnvFactory):
    """Envs that count their steps.

    Args:
        names: the tasks.
        success_at: env step from which success holds; 0 for never.
        success_lasts: env steps that it holds; 0 for the rest of the episode.
        success_every: only seeds divisible by it succeed.
        failure_at: env step at which the task is lost; 0 for never.
        wordy: the instruction names the episode's seed.
        image: give an image too.
        batched: one simulator for all rows.
        odd_env: the env whose state is of another length; -1 for none.
        fault: what breaks, ``"<raise | hang | die>-in-<build | reset | step>"``; empty for nothing.
        fault_env: in which env.
        fault_step: at which of its env steps.
        flag: file that is made when the fault begins.
    """

    num_envs: int = 2
    chunk_size: int = 2
    max_episode_steps: int = 5
    names: tuple[str, ...] = ("clock",)
    success_at: int = 0
    success_lasts: int = 0
    success_every: int = 1
    failure_at: int = 0
    wordy: bool = False
    image: bool = False
    batched: bool = False
    odd_env: int = -1
    fault: str = ""
    fault_env: int = 0
    fault_step: int = 1
    flag: str = ""

    @property
    def task_names(self) -> list[str]:
        return list(self.names)

    @property
    def is_batched(self) -> bool:
        return self.batched

    def make_simulator(self, index: int, render: bool = False) -> ClockSimulator:
        if not self.batched and not 0 <= index < self.num_envs:
            raise IndexError(f"env {index} of {self.num_envs}")
        simulator = ClockSimulator(self, index, self.num_envs if self.batched else 1)
        simulator._fail("build")
        return simulator


class Stillborn(ClockEnvs):
    """Cannot be unpickled, so that its worker ends before it can report anything."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("this is what a script without a main guard does to its workers")


def known_value(state: Tensor, tokens: Tensor) -> Tensor:
    """The value that :class:`KnownPolicy` gives: another one for every seed, env step and instruction. ``[*B, 1]``."""
    return (state[..., 0] + 1000.0 * state[..., 1] + tokens[..., 0] / 16.0).unsqueeze(-1)


class KnownPolicy(VLAPolicy):
    """Acts by its request keys alone; its value is :func:`known_value`.

    Args:
        nan_at: gives NaN where the episode is this far; -1 for never.
        on_act: called before each decision.
    """

    def __init__(self, nan_at: int = -1, on_act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.nan_at, self.on_act = nan_at, on_act

    def build(self, spec: EnvSpec) -> None:
        if self.env_spec is None:
            self.bias = nn.Parameter(torch.zeros(()))
        self.env_spec = spec

    def tokenize(self, instruction: str) -> Tensor:
        return torch.tensor([zlib.crc32(instruction.encode()) % 4093])

    def act(self, td: TensorDictBase) -> TensorDictBase:
        if self.on_act is not None:
            self.on_act()
        assert self.env_spec is not None
        noise = normal(td[keys.REQUEST_KEY].squeeze(-1), self.env_spec.chunk_size, ACTION_DIM)
        chunk = 0.3 * noise if exploration_type() == ExplorationType.RANDOM else torch.full_like(noise, 0.25)
        state = td[keys.STATE]
        chunk = torch.where((state[:, 1] == self.nan_at).reshape(-1, 1, 1), float("nan"), chunk)
        td.set(keys.CHUNK, chunk).set(keys.LOG_PROB, torch.zeros_like(chunk))
        return td.set(keys.VALUE, known_value(state, td[keys.INSTRUCTION_TOKENS]))

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        zeros = torch.zeros_like(td[keys.CHUNK]) + self.bias
        value = known_value(td[keys.STATE], td[keys.INSTRUCTION_TOKENS]) + self.bias
        parts = {keys.LOG_PROB: zeros, keys.ENTROPY: zeros, keys.VALUE: value}
        return TensorDict(parts, batch_size=td.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steady(ScriptedController):
    """A scripted controller: the same action always. ``fault`` raises at the ``fault_step``-th action."""

    def __init__(self, action: float = 0.5, fault_step: int = 0) -> None:
        self.action, self.fault_step, self.steps = action, fault_step, 0

    def reset(self, simulator: Simulator) -> None:
        pass

    def act(self, simulator: Simulator) -> Tensor:
        self.steps += 1
        if self.steps == self.fault_step:
            raise LookupError("the controller lost its way")
        return torch.full((simulator.num_rows, ACTION_DIM), self.action)


def reproducible(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics without those of time, of memory or of chance arrivals, which no two runs have in common."""
    beginnings = ("time/", "memory/", "batch_size/", "request_wait_s/", "forward_s/", "elapsed_s")
    ends = ("/idle_share", "/no_slot_share", "/occupied_share")
    return {name: value for name, value in metrics.items() if not name.startswith(beginnings) and not name.endswith(ends)}


class Metrics(Callback):
    """Keeps the metrics of every step by its number, as far as they are reproducible."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self.steps[trainer.state.counters.step] = reproducible(metrics)


def tiny(**options: Any) -> TinyVLAPolicy:
    """A policy of a few thousand parameters, with PPO unless said otherwise."""
    from vla_async.objectives import PPO

    return TinyVLAPolicy(**({"objective": PPO(), "hidden": (16, 16), "vocab_size": 64, "instruction_dim": 4} | options))


def make_trainer(root: Path, **options: Any) -> AsyncTrainer:
    """A trainer on the CPU that writes below ``root``."""
    return AsyncTrainer(**({"root_dir": root, "accelerator": "cpu", "name": "test"} | options))


def equal(left: Any, right: Any) -> bool:
    """Whether two nested states are the same, bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right) or (left != left and right != right)


def is_running(pid: int) -> bool:
    """Whether a process lives. A zombie does not, once all its threads have ended, which hold its end of every pipe open."""
    try:
        zombie = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return not zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for something that must come to pass; the limit only keeps a broken test from waiting for ever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)
