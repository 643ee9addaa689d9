"""``Validation``: evaluates what a trainer trains, while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_async.loops.evaluate import EvaluationResult
from vla_async.rng import Split

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class Validation:
    """Validates in turn: before the first step and after every ``val_every_n_steps``, training waits until it is done."""

    def begin(self, trainer: AsyncTrainer) -> None:
        """Training is about to begin, from a state that is set up."""
        if trainer.state.counters.step == 0 and (first := self.metrics(trainer)):
            trainer.log(first)

    def metrics(self, trainer: AsyncTrainer) -> dict[str, float]:
        """A step has ended, and is about to be logged; returns what is to be logged with it."""
        if not is_due(trainer):
            return {}
        with trainer.untimed():
            return evaluate_in_turn(trainer, "validate").metrics()

    def step_ended(self, trainer: AsyncTrainer) -> None:
        """A step has ended, has been logged, and its state is kept."""

    def finish(self, trainer: AsyncTrainer) -> None:
        """Training is over, by its budget; wait for what is still to come."""

    def save(self, trainer: AsyncTrainer, name: str) -> Path:
        """Write ``checkpoints/<name>.ckpt``: the state whose weights were evaluated last."""
        return trainer.save_checkpoint(name)

    def close(self) -> None:
        """End what runs. Called on every kind of exit."""


def is_due(trainer: AsyncTrainer) -> bool:
    """Whether the schedule asks for a validation of the weights as they are now."""
    every = trainer.val_every_n_steps
    return trainer.state.stage == "fit" and every > 0 and trainer.state.counters.step % every == 0


def evaluate_in_turn(trainer: AsyncTrainer, split: Split) -> EvaluationResult:
    """Evaluate the policy as it is, where it trains, and tell the callbacks."""
    version, autocast = trainer.state.counters.step, trainer.fabric.autocast
    result = trainer.evaluate_loop.run(
        trainer.policy, trainer.env, split, policy_version=version, videos=trainer.run.videos, autocast=autocast
    )
    tell(trainer, result)
    return result


def tell(trainer: AsyncTrainer, result: EvaluationResult) -> None:
    """Tell the callbacks that an evaluation has ended."""
    for callback in trainer.callbacks:
        callback.on_evaluation_end(trainer, result)
