"""``Checkpoint``: keeps ``last`` and ``best`` of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vla_async.callbacks.base import Callback

if TYPE_CHECKING:
    from vla_async.loops.evaluate import EvaluationResult
    from vla_async.trainer import AsyncTrainer


class Checkpoint(Callback):
    """Writes ``checkpoints/last.ckpt``, to resume from, and ``checkpoints/best.ckpt``, the best by validated success_once.

    A run that is cut short, by Ctrl-C or by the death of an env, leaves the state in which its last step ended, so that
    it can be resumed as if nothing had happened. One that computes a number that is not finite keeps the ``last`` that it
    had: the weights may be what broke it.

    Args:
        every_n_steps: write ``last`` after every n steps; 0 for never.
        every_s: write ``last`` after the first step that ends so many seconds after it was last written; 0 for never. It
            is what remains of a run that is killed.
        save_last: write ``last`` when the run ends or is cut short.
        save_best: write ``best`` when a validation during ``fit`` is at least as good as all before; of equals the newest
            is kept, which has trained the longest. It holds the state that was validated, also where training has gone on
            meanwhile (``evaluate_loop.beside_training``), and can be resumed from like ``last``.
    """

    def __init__(
        self, every_n_steps: int = 0, every_s: float = 300.0, save_last: bool = True, save_best: bool = True
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"checkpoint.every_n_steps={every_n_steps} must be 0 (never) or a number of steps")
        if not every_s >= 0:
            raise ValueError(f"checkpoint.every_s={every_s} must be 0 (never) or a number of seconds")
        self.every_n_steps, self.every_s, self.save_last, self.save_best = every_n_steps, every_s, save_last, save_best
        self._running, self._saved_step, self._saved_at = False, -1, 0.0

    def on_start(self, trainer: AsyncTrainer) -> None:
        self._running, self._saved_step, self._saved_at = True, -1, time.monotonic()

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        due = self.every_s > 0 and time.monotonic() - self._saved_at >= self.every_s
        if due or (self.every_n_steps and trainer.state.counters.step % self.every_n_steps == 0):
            self._save(trainer)

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        if not self._running or trainer.state.stage != "fit":
            return
        success = result.success("success_once").rate
        if success >= trainer.state.counters.best_success:
            trainer.state.counters.best_success = success  # before it is saved, so that a run resumed from it knows
            self._saved_step = -1  # what has been saved of this step does not know
            if self.save_best:
                trainer.validation.save(trainer, "best")

    def on_exception(self, trainer: AsyncTrainer, error: BaseException) -> None:
        running, self._running = self._running, False
        if running and self.save_last and not isinstance(error, ArithmeticError):
            self._save(trainer)

    def on_end(self, trainer: AsyncTrainer) -> None:
        running, self._running = self._running, False
        if running and self.save_last and self._saved_step != trainer.state.counters.step:
            self._save(trainer)

    def _save(self, trainer: AsyncTrainer) -> None:
        trainer.save_checkpoint("last", finished_step=True)
        self._saved_step, self._saved_at = trainer.state.counters.step, time.monotonic()
