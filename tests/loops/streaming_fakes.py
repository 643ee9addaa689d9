"""Envs that can be held, episodes whose length depends on luck, and objectives that tell what they were given."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from tests.fakes import ClockEnvs, ClockSimulator, KnownPolicy, Metrics, make_trainer
from vla_async.callbacks import Callback
from vla_async.envs import SimStep
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import GRPO, PPO
from vla_async.policies import VLAPolicy
from vla_async.trainer import AsyncTrainer


class HeldSimulator(ClockSimulator):
    """Success is a matter of luck, from the second env step on; one env waits at one of its steps while a file exists."""

    factory: HeldEnvs

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        factory, gate, reached = self.factory, Path(self.factory.gate), Path(f"{self.factory.gate}-reached")
        if self.index == factory.held_env and self._steps + 1 == factory.held_step:
            reached.touch()
            while gate.exists():
                time.sleep(0.005)
        while factory.together and gate.exists() and self.index != factory.held_env and not reached.exists():
            time.sleep(0.005)
        step = super().step(action, rows)
        if self.factory.lucky:
            step.success = (self._total > 0.0) & (self._elapsed >= 2)
        return step


@dataclass(kw_only=True)
class HeldEnvs(ClockEnvs):
    """As :class:`ClockEnvs`.

    Args:
        lucky: an episode succeeds when the sum of its actions is positive, so that its length is a matter of luck.
        gate: while this file exists, an env waits.
        held_env: which one; -1 for none.
        held_step: at which of its env steps.
        together: the other envs begin when it waits, so that it has not begun later than they, however slow the machine.
    """

    lucky: bool = False
    gate: str = ""
    held_env: int = -1
    held_step: int = 1
    together: bool = False

    def make_simulator(self, index: int, render: bool = False) -> ClockSimulator:
        return HeldSimulator(self, index, self.num_envs if self.batched else 1)


class SpyGRPO(GRPO):
    """Keeps what it prepares."""

    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        prepared = super().prepare(trajectories)
        self.__dict__.setdefault("prepared", []).append(prepared.clone())
        return prepared


class SpyPPO(PPO):
    """Keeps what it prepares."""

    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        prepared = super().prepare(trajectories)
        self.__dict__.setdefault("prepared", []).append(prepared.clone())
        return prepared


def known(objective: Any) -> KnownPolicy:
    """A policy whose values are known, with an objective."""
    policy = KnownPolicy()
    policy.objective = objective
    return policy


def fit(
    root: Path,
    policy: VLAPolicy,
    envs: Any,
    *callbacks: Callback,
    max_steps: int = 4,
    ckpt_path: str | None = None,
    **loop: Any,
) -> tuple[AsyncTrainer, dict[int, dict[str, float]]]:
    """Train with a :class:`StreamingFitLoop`; what was logged, by step."""
    metrics = Metrics()
    fit_loop = StreamingFitLoop(**({"decisions_per_env": 3, "update_epochs": 1} | loop))
    trainer = make_trainer(root, fit_loop=fit_loop, max_steps=max_steps, callbacks=[*callbacks, metrics], num_threads=1)
    trainer.fit(policy, envs, ckpt_path=ckpt_path)
    return trainer, metrics.steps


def balance(metrics: dict[str, float]) -> bool:
    """Whether all that was produced is consumed, dropped or still there."""
    parts = sum(value for name, value in metrics.items() if name.startswith("queue/dropped/"))
    return metrics["queue/produced"] == metrics["queue/consumed"] + metrics["queue/in_flight"] + parts
