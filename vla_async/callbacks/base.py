"""``Callback``: looks on while a trainer works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_async.data.trajectory_store import TrajectoryStore
    from vla_async.loops.evaluate import EvaluationResult
    from vla_async.trainer import AsyncTrainer


class Callback:
    """Hooks that do nothing; override those you need. ``trainer.state`` and ``trainer.run`` tell the rest."""

    def check(self, trainer: AsyncTrainer) -> None:
        """Training is asked for, and nothing is started yet.

        Raises:
            ValueError: if this cannot work with the trainer's settings; names the setting and the fix.
        """

    def on_start(self, trainer: AsyncTrainer) -> None:
        """Training starts; policy, optimizer and envs are ready, a checkpoint is loaded."""

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        """A step has ended and its metrics have been logged."""

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        """An evaluation has ended: during training, or on its own.

        Beside training, ``trainer.state`` has gone on; ``result`` says which weights were evaluated, and
        ``trainer.validation.save(trainer, name)`` writes their state.
        """

    def on_exception(self, trainer: AsyncTrainer, error: BaseException) -> None:
        """Training was cut short, by an error or by Ctrl-C (``KeyboardInterrupt``)."""

    def on_end(self, trainer: AsyncTrainer) -> None:
        """Training is over, on every kind of exit."""

    def trajectory_store(self, trainer: AsyncTrainer) -> TrajectoryStore | None:
        """Where episodes of the run are to be saved, which has a directory by then; None for nowhere."""
        return None
