"""``Checkpoint``: when ``last`` and ``best`` are written, and when they must be left alone."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric

from tests.fakes import make_trainer as real_trainer
from tests.fakes import tiny
from vla_async.callbacks import Callback, Checkpoint
from vla_async.collectors.pool import WorkerError
from vla_async.envs import ToyEnvs
from vla_async.loops import SyncFitLoop
from vla_async.state import read_checkpoint


def steps(checkpoint: Checkpoint, trainer: Any, number: int) -> None:
    for _ in range(number):
        trainer.state.counters.step += 1
        checkpoint.on_step_end(trainer, {})


def test_last_is_written_every_n_steps_and_at_the_end(make_trainer):
    checkpoint, trainer = Checkpoint(every_n_steps=2), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 5)
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 2), ("last", 4), ("last", 5)]


def test_last_is_not_written_twice_for_one_step(make_trainer):
    checkpoint, trainer = Checkpoint(every_n_steps=2), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 4)
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 2), ("last", 4)]


def test_by_default_last_is_written_at_the_end_only(make_trainer):
    checkpoint, trainer = Checkpoint(), make_trainer(stage="sft")
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 3)
    assert trainer.saved == []
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 3)]


def test_without_save_last_the_end_writes_nothing(make_trainer):
    checkpoint, trainer = Checkpoint(save_last=False), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 3)
    checkpoint.on_exception(trainer, KeyboardInterrupt())
    checkpoint.on_end(trainer)
    assert trainer.saved == []


def test_an_interrupt_writes_last_once_although_the_step_was_saved_before(make_trainer):
    """What else happened since (a best success) is in the second one only."""
    checkpoint, trainer = Checkpoint(every_n_steps=1), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 1)
    checkpoint.on_exception(trainer, KeyboardInterrupt())
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 1), ("last", 1)]


@pytest.mark.parametrize("error", [FloatingPointError(), OverflowError()])
def test_a_number_that_is_not_finite_leaves_last_alone(make_trainer, error):
    checkpoint, trainer = Checkpoint(every_n_steps=2), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 3)
    checkpoint.on_exception(trainer, error)
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 2)]


@pytest.mark.parametrize("error", [WorkerError("killed"), RuntimeError(), KeyboardInterrupt()])
def test_any_other_end_leaves_what_can_be_resumed(make_trainer, error):
    """An env that dies after ten hours must not take the ten hours with it."""
    checkpoint, trainer = Checkpoint(), make_trainer()
    checkpoint.on_start(trainer)
    steps(checkpoint, trainer, 3)
    checkpoint.on_exception(trainer, error)
    checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 3)]


def test_last_is_written_from_time_to_time(make_trainer, monkeypatch):
    """It is what remains of a run that is killed."""
    now = [100.0]
    monkeypatch.setattr("vla_async.callbacks.checkpoint.time.monotonic", lambda: now[0])
    checkpoint, trainer = Checkpoint(every_s=60.0), make_trainer()
    checkpoint.on_start(trainer)
    for later in (30.0, 31.0, 10.0, 49.0, 1.0):
        now[0] += later
        steps(checkpoint, trainer, 1)
    assert trainer.saved == [("last", 2), ("last", 5)]


def test_a_run_that_never_started_has_nothing_to_save(make_trainer):
    checkpoint, trainer = Checkpoint(), make_trainer()
    del trainer.state  # as when an env could not be built
    checkpoint.on_exception(trainer, KeyboardInterrupt())
    checkpoint.on_end(trainer)
    assert trainer.saved == []


def test_best_follows_the_best_validation_and_of_equals_the_newest(make_trainer, evaluation):
    checkpoint, trainer = Checkpoint(), make_trainer()
    checkpoint.on_start(trainer)
    for successes in (1, 4, 3, 4, 0):
        checkpoint.on_evaluation_end(trainer, evaluation((successes, 0, 5)))
        steps(checkpoint, trainer, 1)
    assert trainer.saved == [("best", 0), ("best", 1), ("best", 3)]
    assert trainer.state.counters.best_success == pytest.approx(0.8)


def test_best_success_is_counted_also_when_best_is_not_saved(make_trainer, evaluation):
    checkpoint, trainer = Checkpoint(save_best=False), make_trainer()
    checkpoint.on_start(trainer)
    checkpoint.on_evaluation_end(trainer, evaluation((3, 0, 5)))
    assert (trainer.saved, trainer.state.counters.best_success) == ([], pytest.approx(0.6))


def test_an_evaluation_outside_of_fit_writes_nothing(make_trainer, evaluation):
    checkpoint, trainer = Checkpoint(), make_trainer(stage="validate")
    checkpoint.on_evaluation_end(trainer, evaluation((5, 5, 5)))
    checkpoint.on_end(trainer)
    assert trainer.saved == []


def test_a_second_run_of_the_same_trainer_starts_afresh(make_trainer):
    checkpoint, trainer = Checkpoint(), make_trainer()
    for _ in range(2):
        trainer.state.counters.step = 0
        checkpoint.on_start(trainer)
        steps(checkpoint, trainer, 2)
        checkpoint.on_end(trainer)
    assert trainer.saved == [("last", 2), ("last", 2)]


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match=r"checkpoint\.every_n_steps=-1 must be 0"):
        Checkpoint(every_n_steps=-1)
    with pytest.raises(ValueError, match=r"checkpoint\.every_s=nan must be 0"):
        Checkpoint(every_s=float("nan"))


class BreakAt(Callback):
    """Raises in the given step."""

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self.error = step, error

    def on_step_end(self, trainer, metrics):
        if trainer.state.counters.step == self.step:
            raise self.error


def fit(root: Path, *callbacks: Callback) -> Path:
    """Three tiny updates; returns where checkpoints are."""
    loop = SyncFitLoop(decisions_per_env=4, update_epochs=1)
    trainer = real_trainer(root, fit_loop=loop, max_steps=3, callbacks=[*callbacks, Checkpoint(every_n_steps=1)])
    try:
        trainer.fit(tiny(), ToyEnvs(num_envs=1))
    finally:
        checkpoints = trainer.run.checkpoints
    return checkpoints


def test_a_run_that_diverges_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(FloatingPointError):
        fit(tmp_path, BreakAt(2, FloatingPointError("NaN")))
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] == 1


def test_a_full_disk_keeps_the_previous_checkpoint_and_leaves_no_half_of_one(tmp_path, monkeypatch):
    whole_save, saved = Fabric.save, []

    def save(self: Fabric, path: Path, state: dict[str, Any]) -> None:
        saved.append(path)
        if len(saved) == 1:
            return whole_save(self, path, state)
        Path(path).write_bytes(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Fabric, "save", save)
    with pytest.raises(RuntimeError, match=r"could not be written: .*No space left.*the previous last\.ckpt is kept"):
        fit(tmp_path)
    [last] = tmp_path.glob("test/*/checkpoints/*")
    assert last.name == "last.ckpt"
    assert read_checkpoint(last)["counters"]["step"] == 1
