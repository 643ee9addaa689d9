"""``Validation``: evaluates what a trainer trains, while it trains: in turn, or beside it.

Beside training, in one picture::

   end of a step ──what a checkpoint would hold, kept anyway──▶ thread ──weights, shared memory──▶ evaluation process
       (goes on at once)                                                          its own envs, its own copy of the policy
   end of a later step ◀──EvaluationResult: logged under the version that was evaluated; best.ckpt is written from what was
       kept of that version
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_async.data.trajectory_store import store_of
from vla_async.loops.evaluate import EvaluateLoop, EvaluationResult
from vla_async.loops.evaluation_process import EvaluationProcess, Snapshot, version_of
from vla_async.monitor import metric_table as names
from vla_async.monitor.timeline_track import Kind
from vla_async.rng import Split
from vla_async.state import Counters, write_checkpoint

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class Validation:
    """Validates in turn: before the first step and after every ``val_every_n_steps``, training waits until it is done."""

    @property
    def note(self) -> str:
        """What runs now, for a line that tells how far the run is."""
        return ""

    def begin(self, trainer: AsyncTrainer) -> None:
        """Training is about to begin, from a state that is set up and kept."""
        if trainer.state.counters.step == 0 and (first := self.metrics(trainer)):
            trainer.log(first)

    def metrics(self, trainer: AsyncTrainer) -> dict[str, float]:
        """A step has ended, and is about to be logged; returns what is to be logged with it."""
        if not is_due(trainer):
            return {}
        with trainer.untimed(), trainer.timeline.span(Kind.VALIDATE, trainer.state.counters.step):
            return evaluate_in_turn(trainer, "validate").metrics()

    def step_ended(self, trainer: AsyncTrainer) -> None:
        """A step has ended, has been logged, and its state is kept."""

    def finish(self, trainer: AsyncTrainer) -> None:
        """Training is over, by its budget; wait for what is still to come."""

    def save(self, trainer: AsyncTrainer, name: str) -> Path:
        """Write ``checkpoints/<name>.ckpt``; for callbacks that are told of an evaluation: the state that was evaluated."""
        return trainer.save_checkpoint(name)

    def close(self) -> None:
        """End what runs. Called on every kind of exit."""


class BesideTraining(Validation):
    """Validates in a process of its own, on a frozen copy of the weights, while rollouts and training go on.

    The schedule is that of :class:`Validation`. A validation that is due while another runs waits for it, without anybody
    waiting for it in turn; if by then a newer one is due, it is skipped, and counted in ``validate/skipped``. Results are
    taken in at the ends of steps, and logged under the version, env steps and training time of what was evaluated. When
    training is over by its budget, those that run or wait are waited for; an interrupt or an error ends them.

    Main memory holds, beside what a run keeps anyway, up to two more copies of what a checkpoint holds (the one that is
    evaluated and the one that waits) and two of the weights (on the way, and in the process).
    """

    def __init__(self) -> None:
        self._process: EvaluationProcess | None = None
        self._running: Snapshot | None = None
        self._waiting: Snapshot | None = None
        self._told: Snapshot | None = None  # the one whose evaluation the callbacks are being told of
        self._skipped = 0

    @property
    def note(self) -> str:
        process, running = self._process, self._running
        if process is None or running is None:
            return ""
        return f"validating step {version_of(running)}: {int(process.progress['ended'])}/{process.wanted} episodes"

    def begin(self, trainer: AsyncTrainer) -> None:
        """Start the process, and hand it the first weights.

        Raises:
            ValueError: if the envs cannot be evaluated in.
            MemoryError: if the weights do not fit into shared memory once more.
        """
        if trainer.state.stage != "fit" or not trainer.val_every_n_steps:
            return
        self._process = EvaluationProcess(trainer)
        if trainer.state.counters.step == 0:
            self.step_ended(trainer)

    def metrics(self, trainer: AsyncTrainer) -> dict[str, float]:
        """Take in a result if there is one; it is logged by itself, under another step."""
        if self._process is not None and self._process.has_spoken:
            self._take_in(trainer)
        return {}

    def step_ended(self, trainer: AsyncTrainer) -> None:
        """Hand the step's weights over, or let them wait, if a validation is due."""
        if self._process is None or not is_due(trainer):
            return
        if self._running is None:
            self._hand_over(trainer.state.finished)
        else:
            self._skipped += self._waiting is not None
            self._waiting = trainer.state.finished

    def finish(self, trainer: AsyncTrainer) -> None:
        """Wait for the results that are still to come, each for as long as an evaluation may take."""
        while self._running is not None:
            self._take_in(trainer)
        if self._process is not None:
            with trainer.interrupts.critical():
                trainer.state.end_step()  # what the results have changed (best_success) is kept with the last step

    def save(self, trainer: AsyncTrainer, name: str) -> Path:
        if self._told is None:
            return trainer.save_checkpoint(name)
        best = {"best_success": trainer.state.counters.best_success}  # which this very evaluation may have raised
        path = trainer.run.checkpoints / f"{name}.ckpt"
        with trainer.interrupts.critical():
            write_checkpoint(trainer.fabric, path, self._told | {"counters": self._told["counters"] | best})
        return path

    def close(self) -> None:
        """End the process and its envs: at once if it evaluates."""
        process, idle = self._process, self._running is None
        self._process = self._running = self._waiting = self._told = None
        self._skipped = 0
        if process is not None:
            process.end(idle)

    def _hand_over(self, snapshot: Snapshot) -> None:
        assert self._process is not None
        self._process.request(snapshot)
        self._running = snapshot

    def _take_in(self, trainer: AsyncTrainer) -> None:
        """Wait for the next result; log it and tell the callbacks, while the weights that wait are evaluated."""
        assert self._process is not None
        result = self._process.receive()
        self._told, self._running = self._running, None
        assert self._told is not None
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._hand_over(waiting)
        counters = Counters(**self._told["counters"])
        result.env_steps = counters.env_steps
        metrics = {**result.metrics(), names.SKIPPED: float(self._skipped), **counters.axes}
        trainer.fabric.log_dict(metrics, step=result.policy_version)
        tell(trainer, result)
        self._told = None


def make_validation(loop: EvaluateLoop) -> Validation:
    """What validates as ``loop`` says."""
    return BesideTraining() if loop.beside_training else Validation()


def is_due(trainer: AsyncTrainer) -> bool:
    """Whether the schedule asks for a validation of the weights as they are now."""
    every = trainer.val_every_n_steps
    return trainer.state.stage == "fit" and every > 0 and trainer.state.counters.step % every == 0


def evaluate_in_turn(trainer: AsyncTrainer, split: Split) -> EvaluationResult:
    """Evaluate the policy as it is, where it trains, and tell the callbacks."""
    counters, autocast = trainer.state.counters, trainer.fabric.autocast
    result = trainer.evaluate_loop.run(
        trainer.policy,
        trainer.env,
        split,
        policy_version=counters.step,
        videos=trainer.run.videos,
        store=store_of(trainer),
        autocast=autocast,
    )
    result.env_steps = counters.env_steps
    tell(trainer, result)
    return result


def tell(trainer: AsyncTrainer, result: EvaluationResult) -> None:
    """Tell the callbacks that an evaluation has ended."""
    for callback in trainer.callbacks:
        callback.on_evaluation_end(trainer, result)
