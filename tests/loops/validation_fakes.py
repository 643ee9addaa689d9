"""Envs whose evaluation is held until a file says otherwise, and callbacks that watch validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.fakes import ClockEnvs, ClockSimulator, wait_until
from vla_async.callbacks import Callback
from vla_async.loops import EvaluationResult
from vla_async.rng import TRAIN_SEEDS
from vla_async.trainer import AsyncTrainer


class GatedSimulator(ClockSimulator):
    """Waits at the start of an evaluation episode until the gate is open; breaks there if it is told to."""

    factory: GatedEnvs

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        gate = Path(self.factory.gate)
        if bool((seeds[rows] >= TRAIN_SEEDS).any()):
            (gate / "entered").touch()
            while not (gate / "open").exists():
                time.sleep(0.005)
            if self.factory.breaks:
                raise LookupError("the gate fell shut")
        return super().reset(rows, seeds)


@dataclass(kw_only=True)
class GatedEnvs(ClockEnvs):
    """As :class:`ClockEnvs`, for training seeds.

    Args:
        gate: a directory. An evaluation makes ``entered`` in it, and goes on as soon as there is ``open``.
        breaks: raise then.
    """

    gate: str = ""
    breaks: bool = False

    def make_simulator(self, index: int, render: bool = False) -> ClockSimulator:
        return GatedSimulator(self, index, self.num_envs if self.batched else 1)


def gated(gate: Path, **options: Any) -> GatedEnvs:
    """Envs with a gate that is shut."""
    gate.mkdir(exist_ok=True)
    return GatedEnvs(gate=str(gate), **options)


def await_evaluation(gate: Path) -> None:
    """Until an evaluation is held."""
    wait_until((gate / "entered").exists, "an evaluation begins")


class Results(Callback):
    """Keeps every evaluation, with the step that training had reached when it was told of."""

    def __init__(self) -> None:
        self.all: list[EvaluationResult] = []
        self.told_at: list[int] = []

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        self.all.append(result)
        self.told_at.append(trainer.state.counters.step)

    @property
    def versions(self) -> list[int]:
        return [result.policy_version for result in self.all]


class At(Callback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, call: Callable[[AsyncTrainer], object]) -> None:
        self.step, self.call = step, call

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.counters.step == self.step:
            self.call(trainer)
