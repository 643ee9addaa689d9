"""A trainer that does nothing but count and remember, for callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vla_async.collectors.episodes import Episode
from vla_async.loops import EvaluationResult
from vla_async.state import Counters


@dataclass
class FakeTrainer:
    """What callbacks see of a trainer. ``saved`` holds (name, step) of every checkpoint."""

    path: Path
    name: str = "fake"
    max_steps: int = -1
    max_env_steps: int | None = None
    stage: str = "fit"
    saved: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state: Any = SimpleNamespace(stage=self.stage, counters=Counters())
        self.run = SimpleNamespace(path=self.path)
        self.origin: Path | None = None
        self.fit_loop = SimpleNamespace(live=lambda trainer: {})
        self.sft_loop = SimpleNamespace(max_steps=8, live=lambda trainer: {})
        self.validation = SimpleNamespace(note="", save=lambda trainer, name: trainer.save_checkpoint(name))

    def save_checkpoint(self, name: str, finished_step: bool = False) -> Path:
        assert finished_step == (name == "last")  # `last` is what a run is resumed from: never the middle of an update
        self.saved.append((name, self.state.counters.step))
        return self.path / f"{name}.ckpt"


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., FakeTrainer]:
    return lambda **options: FakeTrainer(tmp_path, **options)


@pytest.fixture
def evaluation() -> Callable[..., EvaluationResult]:
    """Builds a result from (successes once, successes at end, n) of each task."""

    def build(*counts: tuple[int, int, int], tasks: Sequence[str] = ("push", "pick")) -> EvaluationResult:
        episodes = []
        for task, (once, at_end, n) in zip(tasks, counts, strict=False):
            episodes += [Episode(task, seed, seed < once, seed < at_end, 1.5, 10) for seed in range(n)]
        return EvaluationResult("validate", 0, episodes)

    return build
