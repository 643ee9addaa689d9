"""AsyncTrainer: what every kind of exit tells, closes and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, KnownPolicy, is_running, make_trainer, tiny
from vla_async.callbacks import Callback, Checkpoint
from vla_async.collectors.pool import WorkerError
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, SyncFitLoop
from vla_async.objectives import PPO, StepOutput
from vla_async.policies import TinyVLAPolicy
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer

TOY = ToyEnvs(num_envs=2, chunk_size=2, max_episode_steps=6)


def short(**options: Any) -> SyncFitLoop:
    return SyncFitLoop(**({"decisions_per_env": 3, "update_epochs": 1} | options))


class Diary(Callback):
    """Writes down the hooks that were called, and fails in those that it is told to."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self.fails_in = fails_in
        self.workers: list[int] = []

    def _write(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise LookupError(f"the diary failed in {name}")

    def on_start(self, trainer: AsyncTrainer) -> None:
        pools = [trainer.fit_loop._pool, trainer.evaluate_loop._pool]  # type: ignore[attr-defined]
        self.workers = [link.process.pid for pool in pools if pool is not None for link in pool._links]
        self._write("start")

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        self._write("step")

    def on_exception(self, trainer: AsyncTrainer, error: BaseException) -> None:
        self._write(type(error).__name__)

    def on_end(self, trainer: AsyncTrainer) -> None:
        self._write("end")


class Breaking(TinyVLAPolicy):
    """Fails between a backward pass and its optimizer step, once."""

    def __init__(self, error: BaseException, at_call: int) -> None:
        super().__init__(PPO(), hidden=(16, 16), vocab_size=64, instruction_dim=4)
        self.error, self.at_call, self.calls = error, at_call, 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        self.calls += 1
        if self.calls == self.at_call:
            raise self.error
        return super().training_step(batch)


def test_a_run_that_was_cut_short_can_be_followed_by_another(tmp_path: Path) -> None:
    """In a notebook Ctrl-C leaves half an accumulation behind; the next fit must neither fail of it nor use it."""
    policy = Breaking(KeyboardInterrupt(), at_call=5)
    trainer = make_trainer(tmp_path, fit_loop=short(micro_batch_size=2), max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(policy, TOY)
    assert any(parameter.grad is not None for parameter in policy.parameters()), "the case is not the one that is meant"
    for runner in (make_trainer(tmp_path, fit_loop=short(micro_batch_size=2), max_steps=2), trainer):
        runner.fit(policy, TOY)
        assert runner.state.counters.step == 2
        assert runner.state.counters.optimizer_steps == 2


class Diverging(TinyVLAPolicy):
    """Its loss is NaN from the n-th step on."""

    def __init__(self, at_call: int, poison: float = float("nan")) -> None:
        super().__init__(PPO(), hidden=(16, 16), vocab_size=64, instruction_dim=4)
        self.at_call, self.calls, self.poison = at_call, 0, poison

    def training_step(self, batch: Any, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        self.calls += 1
        output = super().training_step(batch)
        return output if self.calls < self.at_call else output._replace(loss=output.loss * self.poison)


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_the_run_and_spoils_no_checkpoint(
    tmp_path: Path, clip: float | None, poison: float
) -> None:
    """Broken weights in last.ckpt would break every resume."""
    trainer = make_trainer(
        tmp_path, fit_loop=short(max_grad_norm=clip), max_steps=5, callbacks=[Checkpoint(every_n_steps=1)]
    )
    with pytest.raises(FloatingPointError, match=r"gradient is not finite .* first in "):
        trainer.fit(Diverging(at_call=3, poison=poison), TOY)
    content = read_checkpoint(trainer.run.checkpoints / "last.ckpt")
    assert content["counters"]["step"] == 2
    assert all(torch.isfinite(value).all() for value in content["state_dict"].values())
    resumed = make_trainer(tmp_path, fit_loop=short(), max_steps=3)
    resumed.fit(tiny(), TOY, ckpt_path="last")
    assert resumed.state.counters.step == 3


@pytest.mark.parametrize(
    ("error", "saved"), [(KeyboardInterrupt(), True), (ArithmeticError("of the policy"), False)], ids=["interrupt", "error"]
)
def test_every_exit_tells_all_callbacks_and_leaves_no_worker(tmp_path: Path, error: BaseException, saved: bool) -> None:
    """And only an interrupt, which says nothing against the weights, leaves a checkpoint."""
    diary = Diary()
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=9, callbacks=[diary])
    with pytest.raises(type(error)):
        trainer.fit(Breaking(error, at_call=2), TOY)
    assert diary.calls == ["start", "step", type(error).__name__, "end"]
    assert len(diary.workers) == 2
    assert not any(map(is_running, diary.workers))
    assert (trainer.run.checkpoints / "last.ckpt").exists() == saved


def test_an_interrupt_that_ended_a_wait_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Ctrl-C would be told as the end of the rank that was killed for it, and leave no checkpoint."""
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=9)
    monkeypatch.setattr(trainer.interrupts, "cause", lambda: KeyboardInterrupt("SIGINT"))
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        trainer.fit(Breaking(RuntimeError("of the wait"), at_call=2), TOY)
    assert (trainer.run.checkpoints / "last.ckpt").exists()


@pytest.mark.parametrize("where", ["start", "step", "ArithmeticError", "end"])
def test_a_callback_that_fails_keeps_nobody_else_from_winding_up(tmp_path: Path, where: str) -> None:
    """Whatever one of them does, workers end, logs are complete and the others hear of it."""
    first, second = Diary(fails_in=where), Diary()
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=2, callbacks=[first, second])
    policy = Breaking(ArithmeticError("of the policy"), at_call=2 if where == "ArithmeticError" else 99)
    with pytest.raises(LookupError, match=f"the diary failed in {where}"):
        trainer.fit(policy, TOY)
    assert second.calls[-1] == "end"
    assert ("ArithmeticError" in second.calls) == (where == "ArithmeticError")
    assert not any(map(is_running, first.workers))


def test_an_env_that_cannot_be_built_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    """No checkpoint of nothing, and the callbacks are told in the right order."""
    diary = Diary()
    trainer = make_trainer(tmp_path, fit_loop=short(), callbacks=[diary])
    with pytest.raises(WorkerError, match="broke in build"):
        trainer.fit(tiny(), ClockEnvs(fault="raise-in-build"))
    assert diary.calls == ["WorkerError", "end"]
    assert not trainer.run.checkpoints.exists()


def test_weights_that_do_not_fit_are_refused_and_workers_end(tmp_path: Path) -> None:
    """Which only the built envs can tell."""
    make_trainer(tmp_path, fit_loop=short(), max_steps=1).fit(tiny(), TOY)
    diary = Diary()
    trainer = make_trainer(tmp_path, fit_loop=short(), init_from="last", callbacks=[diary])
    with pytest.raises(ValueError, match=r"the weights of .*last.ckpt do not fit this TinyVLAPolicy"):
        trainer.fit(tiny(), ToyEnvs(num_envs=1, chunk_size=3, max_episode_steps=6))
    assert diary.calls == ["ValueError", "end"]


def test_an_evaluation_that_fails_leaves_no_worker(tmp_path: Path) -> None:
    """It winds up as training does."""
    trainer = make_trainer(tmp_path, evaluate_loop=EvaluateLoop(num_episodes=2, num_videos=0))
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.validate(KnownPolicy(nan_at=0), ClockEnvs())
    assert trainer.evaluate_loop._pool is None
