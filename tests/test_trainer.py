"""AsyncTrainer: how runs start, what they start from, and how they follow each other."""

from __future__ import annotations

import csv
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, Steady, equal, make_trainer, tiny
from vla_async.callbacks import Callback, Checkpoint, Progress, SuccessPlot, TrajectoryRecorder
from vla_async.envs import ToyEnvs
from vla_async.loops import CollectLoop, EvaluateLoop, SFTLoop, SyncFitLoop
from vla_async.objectives import PPO, StepOutput
from vla_async.policies import TinyVLAPolicy
from vla_async.rng import evaluation_seed
from vla_async.trainer import AsyncTrainer

TOY = ToyEnvs(num_envs=2, chunk_size=2, max_episode_steps=6)


def short(**options: Any) -> SyncFitLoop:
    return SyncFitLoop(**({"decisions_per_env": 3, "update_epochs": 1} | options))


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
    """One that is given takes the place of the default one. Checkpoint comes last: it saves what the others have changed."""
    mine = Checkpoint(every_n_steps=3)
    kinds = [type(callback) for callback in make_trainer(tmp_path, callbacks=[mine, Callback()]).callbacks]
    assert kinds == [Callback, SuccessPlot, TrajectoryRecorder, Progress, Checkpoint]


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


def test_a_policy_is_free_again_after_its_run(tmp_path: Path) -> None:
    """Its parameters carry no guard of the trainer's: whoever goes on with it in other code may call backward."""
    learner = tiny()
    trainer = make_trainer(tmp_path, fit_loop=short(), max_steps=1)
    trainer.fit(learner, TOY)
    sum((value**2).sum() for value in learner.parameters()).backward()  # type: ignore[union-attr]
    assert all(value.grad is not None for value in learner.parameters())


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
        ({"seed": -1}, r"trainer.seed=-1 must be at least 0 and at most 4294967295"),
        ({"seed": 2**32}, r"trainer.seed=4294967296 must be at least 0 and at most 4294967295"),
        ({"fit_loop": SFTLoop()}, r"trainer.fit_loop=SFTLoop is a loop of sft; give a SyncFitLoop"),
        ({"num_threads": 0}, "trainer.num_threads=0 must be at least 1, or null"),
        ({"name": "a/b"}, "trainer.name='a/b' must be a plain directory name"),
        ({"name": ""}, "trainer.name='' must be a plain directory name"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **options)
