"""AsyncTrainer: how runs start, end, fail and follow each other."""

from __future__ import annotations

import csv
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, KnownPolicy, Steady, equal, is_running, make_trainer, tiny
from vla_async.callbacks import Callback, Checkpoint, Progress, SuccessPlot
from vla_async.collectors.pool import WorkerError
from vla_async.envs import ToyEnvs
from vla_async.loops import CollectLoop, EvaluateLoop, SFTLoop, SyncFitLoop
from vla_async.objectives import PPO, StepOutput
from vla_async.policies import TinyVLAPolicy
from vla_async.rng import evaluation_seed
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


def test_one_policy_goes_through_all_stages(tmp_path: Path) -> None:
    """From Python the stages follow each other on one policy object: collect, imitate, improve, evaluate."""
    trainer = make_trainer(
        tmp_path,
        collect_loop=CollectLoop(Steady(0.3), num_episodes=4, directory=tmp_path / "set"),
        sft_loop=SFTLoop(tmp_path / "set", max_steps=3, batch_size=4),
        fit_loop=short(),
        evaluate_loop=EvaluateLoop(num_episodes=2, num_videos=0),
        max_steps=2,
    )
    policy, envs = tiny(), ClockEnvs(success_at=3)
    trainer.collect(policy, envs)
    trainer.sft(policy, envs)
    imitated = {name: value.clone() for name, value in policy.state_dict().items()}
    before = trainer.validate(policy, envs)
    trainer.fit(policy, envs)
    assert trainer.state.counters.step == 2
    assert not equal(imitated, policy.state_dict())
    after = trainer.test(policy, envs)
    assert (before.success().rate, after.success().rate) == (1.0, 1.0)
    assert [episode.seed for episode in after.episodes] == [evaluation_seed("test", number) for number in range(2)]
    assert len(list((tmp_path / "test").iterdir())) == 5, "each call has a run directory of its own"


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


def test_what_cannot_be_resumed_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """A wrong checkpoint must not cost the minute that simulators take to build, nor leave an empty run."""
    make_trainer(tmp_path, fit_loop=short(), max_steps=1).fit(tiny(), TOY)
    trainer = make_trainer(tmp_path, sft_loop=SFTLoop(tmp_path / "none"), max_steps=1)
    with pytest.raises(ValueError, match=r"was written by 'fit', so 'sft' cannot resume it"):
        trainer.sft(tiny(), ClockEnvs(fault="raise-in-build"), ckpt_path="last")
    with pytest.raises(FileNotFoundError, match="no run under"):
        make_trainer(tmp_path, name="other").fit(tiny(), ClockEnvs(fault="raise-in-build"), ckpt_path="last")
    with pytest.raises(FileNotFoundError, match="'nowhere' is not a file"):
        make_trainer(tmp_path, init_from="nowhere").fit(tiny(), ClockEnvs(fault="raise-in-build"))
    assert len(list((tmp_path / "test").iterdir())) == 1


def test_init_from_takes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    """The way from imitation to reinforcement learning: counters and optimizer start anew."""
    first = make_trainer(tmp_path, fit_loop=short(), max_steps=2)
    first.fit(tiny(), TOY)
    weights = {name: value.clone() for name, value in first.policy.state_dict().items()}
    seen = []

    class Look(Callback):
        def on_start(self, trainer: AsyncTrainer) -> None:
            seen.append(equal(dict(trainer.policy.state_dict()), weights))
            seen.append(trainer.state.optimizer.state_dict()["state"] == {})

    second = make_trainer(tmp_path, fit_loop=short(), max_steps=1, init_from="last", callbacks=[Look()])
    second.fit(tiny(), TOY)
    assert seen == [True, True]
    assert second.state.counters.step == 1


def test_weights_that_do_not_fit_are_refused_and_workers_end(tmp_path: Path) -> None:
    """Which only the built envs can tell."""
    make_trainer(tmp_path, fit_loop=short(), max_steps=1).fit(tiny(), TOY)
    diary = Diary()
    trainer = make_trainer(tmp_path, fit_loop=short(), init_from="last", callbacks=[diary])
    with pytest.raises(ValueError, match=r"the weights of .*last.ckpt do not fit this TinyVLAPolicy"):
        trainer.fit(tiny(), ToyEnvs(num_envs=1, chunk_size=3, max_episode_steps=6))
    assert diary.calls == ["ValueError", "end"]


def test_an_evaluation_says_which_weights_it_measured(tmp_path: Path) -> None:
    """By the checkpoint's step, in the result, the log and the videos' names."""
    make_trainer(tmp_path, fit_loop=short(), max_steps=2).fit(tiny(), TOY)
    trainer = make_trainer(tmp_path, evaluate_loop=EvaluateLoop(num_episodes=2))
    trainer.config_text = "seed: 0\n"
    result = trainer.test(tiny(), TOY, ckpt_path="last")
    assert result.policy_version == 2
    assert [path.name.split("_")[:2] for path in result.videos] == [["test", "000002"]]
    assert (trainer.run.path / "config.yaml").read_text() == "seed: 0\n"
    with (trainer.run.path / "metrics.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["step"], row["test/episodes"]) == ("2", "2")
    untrained = make_trainer(tmp_path, evaluate_loop=EvaluateLoop(num_episodes=1, num_videos=0)).validate(tiny(), TOY)
    assert untrained.policy_version == 0


def test_an_evaluation_that_fails_leaves_no_worker(tmp_path: Path) -> None:
    """It winds up as training does."""
    trainer = make_trainer(tmp_path, evaluate_loop=EvaluateLoop(num_episodes=2, num_videos=0))
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.validate(KnownPolicy(nan_at=0), ClockEnvs())
    assert trainer.evaluate_loop._pool is None


def test_training_time_adds_up_over_resumes_and_leaves_validation_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves over training time compare methods; a run that validates more must not look slower."""
    now = [0.0]
    monkeypatch.setattr("vla_async.trainer.time.perf_counter", lambda: now[0])

    class Slow(TinyVLAPolicy):
        def training_step(self, batch: Any, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
            now[0] += 10.0
            return super().training_step(batch)

    class SlowEvaluation(EvaluateLoop):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            now[0] += 1000.0
            return super().run(*args, **kwargs)

    def policy() -> Slow:
        return Slow(PPO(), hidden=(16, 16), vocab_size=64, instruction_dim=4)

    loop = SlowEvaluation(num_episodes=1, num_videos=0)
    options: dict[str, Any] = {"fit_loop": short(), "evaluate_loop": loop, "callbacks": [Quiet()], "val_every_n_steps": 1}
    trainer = make_trainer(tmp_path, max_steps=2, **options)
    trainer.fit(policy(), TOY)
    assert trainer.state.counters.elapsed_s == 20.0
    assert now[0] == 3020.0
    resumed = make_trainer(tmp_path, max_steps=3, **options)
    resumed.fit(policy(), TOY, ckpt_path="last")
    assert resumed.state.counters.elapsed_s == 30.0


class Quiet(Progress):
    """No clock of its own."""

    def on_start(self, trainer: AsyncTrainer) -> None:
        pass

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        pass

    def on_evaluation_end(self, trainer: AsyncTrainer, result: Any) -> None:
        pass

    def on_end(self, trainer: AsyncTrainer) -> None:
        pass


def test_the_usual_callbacks_are_there_once(tmp_path: Path) -> None:
    """One that is given takes the place of the default one."""
    mine = Checkpoint(every_n_steps=3)
    kinds = [type(callback) for callback in make_trainer(tmp_path, callbacks=[mine, Diary()]).callbacks]
    assert kinds == [Checkpoint, Diary, SuccessPlot, Progress]


def test_training_works_in_a_thread(tmp_path: Path) -> None:
    """Where Python allows no signal handlers, as in some notebooks and services."""
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=1)
    thread = threading.Thread(target=trainer.fit, args=(tiny(), TOY))
    thread.start()
    thread.join()
    assert trainer.state.counters.step == 1


@pytest.mark.parametrize("wanted", [None, 3])
def test_torch_leaves_the_cores_to_the_envs_while_a_run_lasts(tmp_path: Path, wanted: int | None) -> None:
    """Two threads that wait for each other on busy cores made imitation thirty times slower."""
    seen = []

    class Look(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    make_trainer(tmp_path, fit_loop=short(), max_steps=1, num_threads=wanted, callbacks=[Look()]).fit(tiny(), TOY)
    assert seen == [wanted or 1]
    assert torch.get_num_threads() == before


def test_bfloat16_trains(tmp_path: Path) -> None:
    """Weights stay in float32; what is stored of a decision is too."""
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=2, precision="bf16-mixed")
    trainer.fit(tiny(), TOY)
    assert all(value.dtype == torch.float32 for value in trainer.policy.parameters())
    assert all(torch.isfinite(value).all() for value in trainer.policy.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -2}, r"trainer.max_steps=-2 must be at least -1, where -1 is no limit"),
        ({"max_env_steps": 0}, "trainer.max_env_steps=0 must be at least 1, or null"),
        ({"val_every_n_steps": -1}, "trainer.val_every_n_steps=-1 must be at least 0, where 0 is never"),
        ({"num_threads": 0}, "trainer.num_threads=0 must be at least 1, or null"),
        ({"name": "a/b"}, "trainer.name='a/b' must be a plain directory name"),
        ({"name": ""}, "trainer.name='' must be a plain directory name"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **options)
