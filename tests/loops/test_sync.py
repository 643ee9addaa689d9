"""SyncFitLoop: what an update is, and that a resumed run is the run that was never interrupted."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import ClockEnvs, KnownPolicy, Metrics, equal, make_trainer, tiny
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, SyncFitLoop
from vla_async.objectives import PPO, StepOutput
from vla_async.policies import TinyVLAPolicy, VLAPolicy
from vla_async.trainer import AsyncTrainer

TOY: dict[str, Any] = {"num_envs": 3, "chunk_size": 2, "max_episode_steps": 7}


class Scheduled(TinyVLAPolicy):
    """With a learning rate that falls, in a scheduler that has to be resumed as well."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def policy(kind: type[TinyVLAPolicy] = TinyVLAPolicy, **objective: Any) -> TinyVLAPolicy:
    return kind(PPO(**objective), hidden=(16, 16), vocab_size=64, instruction_dim=4, lr=1e-2)


def fit(
    root: Path,
    learner: VLAPolicy,
    max_steps: int,
    ckpt_path: str | None = None,
    env: dict[str, Any] | None = None,
    callbacks: list[Callback] | None = None,
    trainer: dict[str, Any] | None = None,
    **loop: Any,
) -> tuple[AsyncTrainer, dict[int, dict[str, float]]]:
    metrics = Metrics()
    options: dict[str, Any] = {"decisions_per_env": 3, "update_epochs": 2, "mini_batch_size": 4} | loop
    runner = make_trainer(
        root,
        fit_loop=SyncFitLoop(**options),
        max_steps=max_steps,
        callbacks=[metrics, *(callbacks or [])],
        **(trainer or {}),
    )
    runner.fit(learner, ToyEnvs(**(TOY | (env or {}))), ckpt_path=ckpt_path)
    return runner, metrics.steps


def everything(runner: AsyncTrainer) -> dict[str, Any]:
    """All that a checkpoint holds, but for the clock."""
    state = runner.state
    counters = {name: value for name, value in vars(state.counters).items() if name != "elapsed_s"}
    assert runner.policy.objective is not None
    return {
        "weights": {name: value.clone() for name, value in state.policy.state_dict().items()},
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "objective": runner.policy.objective.state_dict(),
        "counters": counters,
        "loop": state.loop,
        "generator": torch.get_rng_state(),
    }


@pytest.mark.parametrize("kind", [TinyVLAPolicy, Scheduled])
@pytest.mark.parametrize("batched", [False, True], ids=["processes", "batch"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, kind: type[TinyVLAPolicy], batched: bool
) -> None:
    """Weights, optimizer, scheduler, advantages' statistics, metrics: with fresh objects, in the middle of episodes."""
    env = {"batched": batched}
    whole, metrics = fit(tmp_path / "whole", policy(kind), 5, env=env)
    fit(tmp_path / "cut", policy(kind), 2, env=env)
    resumed, later = fit(tmp_path / "cut", policy(kind), 5, ckpt_path="last", env=env)
    assert sorted(later) == [3, 4, 5]
    for step in later:
        assert equal(later[step], metrics[step]), f"step {step}"
    left, right = everything(whole), everything(resumed)
    for part in left:
        assert equal(left[part], right[part]), f"{part} differs"


class StopIn(Callback):
    """Ctrl-C in the middle of what follows a step: at the third call of one of the policy's methods."""

    def __init__(self, after: int, method: str) -> None:
        self.after, self.method = after, method

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.after:
            original, calls = getattr(trainer.policy, self.method), iter(range(1000))

            def interrupted(*args: Any) -> Any:
                if next(calls) == 2:
                    raise KeyboardInterrupt
                return original(*args)

            setattr(trainer.policy, self.method, interrupted)


class StopInValidation(Callback):
    """Ctrl-C at the end of the validation at a step, before anything of it has been logged."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_evaluation_end(self, trainer: AsyncTrainer, result: Any) -> None:
        if trainer.state.counters.step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "stop", [StopIn(1, "act"), StopIn(1, "evaluate"), StopInValidation(2)], ids=lambda stop: repr(vars(stop))
)
def test_a_run_that_was_interrupted_anywhere_resumes_without_a_trace(tmp_path: Path, stop: Callback) -> None:
    """Ctrl-C in a rollout, in an update or in a validation: what the step had done so far is done again, the same."""
    options: dict[str, Any] = {
        "trainer": {"val_every_n_steps": 2, "evaluate_loop": EvaluateLoop(num_episodes=2, num_videos=0)}
    }
    whole, metrics = fit(tmp_path / "whole", policy(), 3, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut", policy(), 3, callbacks=[stop], **options)
    resumed, later = fit(tmp_path / "cut", policy(), 3, ckpt_path="last", **options)
    assert sorted(later) == [2, 3]
    assert equal(later, {step: metrics[step] for step in later})
    assert equal(everything(whole), everything(resumed))


def test_another_seed_does_not_resume_a_run(tmp_path: Path) -> None:
    """Its envs would start other episodes than those that the checkpoint counts."""
    fit(tmp_path, policy(), 1)
    with pytest.raises(ValueError, match=r"of a run with trainer.seed=0, not 1; resume it with its own seed"):
        fit(tmp_path, policy(), 2, ckpt_path="last", trainer={"seed": 1})


def test_a_second_run_of_one_policy_warms_its_critic_up_again(tmp_path: Path) -> None:
    """Else what an earlier run counted would decide what a later one trains."""
    learner = policy(critic_warmup_updates=1)
    fit(tmp_path / "first", learner, 2)
    before = [value.clone() for value in learner.actor.parameters()]
    fit(tmp_path / "second", learner, 1)
    assert equal(before, list(learner.actor.parameters()))


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path: Path) -> None:
    """Whole runs are compared by it."""
    first, again = fit(tmp_path, policy(), 2), fit(tmp_path, policy(), 2)
    other = fit(tmp_path, policy(), 2, trainer={"seed": 1})
    assert equal(first[1], again[1])
    assert equal(everything(first[0]), everything(again[0]))
    assert not equal(everything(first[0])["weights"], everything(other[0])["weights"])


def test_validation_does_not_change_the_training(tmp_path: Path) -> None:
    """A run that validates more often must not be another run."""
    plain, _ = fit(tmp_path, policy(), 2)
    validating, _ = fit(
        tmp_path, policy(), 2, trainer={"val_every_n_steps": 1, "evaluate_loop": EvaluateLoop(num_episodes=2, num_videos=0)}
    )
    left, right = everything(plain), everything(validating)
    for part in left.keys() - {"counters"}:  # which know of the best success
        assert equal(left[part], right[part]), f"{part} differs"


def test_micro_batches_do_not_change_the_result(tmp_path: Path) -> None:
    """They are there to fit memory; uneven ones included. Only the order of a sum differs."""
    weights = []
    for micro in (None, 1, 3):
        runner, _ = fit(tmp_path, policy(), 2, micro_batch_size=micro)
        weights.append(runner.policy.state_dict())
    for other in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(other[name], value, rtol=0.0, atol=2e-5)


def rows_of(runner: AsyncTrainer) -> list[dict[str, str]]:
    with (runner.run.path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_tell_what_happened(tmp_path: Path) -> None:
    """Against what the collected batch must have held: 3 envs of 3 decisions of 2 env steps, horizon 7."""
    runner, metrics = fit(tmp_path, policy(), 4)
    assert [metrics[step]["staleness/max"] for step in metrics] == [0.0] * 4
    rows = rows_of(runner)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert float(row["time/env_steps_per_s"]) > 0
        assert float(row["time/rollout_s"]) > 0
        assert float(row["time/train_s"]) > 0
    counters = runner.state.counters
    assert counters.step == 4
    assert counters.optimizer_steps == 4 * 2 * 3, "2 epochs of 9 decisions in mini-batches of 4, 4 and 1"
    episodes = sum(values.get("rollout/episodes", 0.0) for values in metrics.values())
    assert counters.episodes == episodes == 9, "each env is 12 decisions far, and an episode takes 4 at the most"
    # the last of the 4 decisions executes 1 env step of 2; no untrained policy succeeds here
    assert counters.env_steps == 3 * 4 * 2 * 3 - 9
    assert metrics[4]["env_steps"] == counters.env_steps


def test_max_env_steps_ends_with_the_update_that_reaches_it(tmp_path: Path) -> None:
    """An update is not cut; the budget is a limit on when the next one begins."""
    runner, metrics = fit(tmp_path, policy(), -1, trainer={"max_env_steps": 30})
    totals = [values["env_steps"] for values in metrics.values()]
    assert totals[-2] < 30 <= totals[-1] == runner.state.counters.env_steps


def test_validation_comes_before_the_first_step_and_after_every_n(tmp_path: Path) -> None:
    """The baseline is part of the curve; a resumed run does not measure it again."""
    trainer: dict[str, Any] = {
        "val_every_n_steps": 2,
        "evaluate_loop": EvaluateLoop(num_episodes=2, num_envs=1, num_videos=0),
    }
    runner, metrics = fit(tmp_path, policy(), 3, trainer=trainer)
    validated = [int(row["step"]) for row in rows_of(runner) if row["validate/success_once"]]
    assert validated == [0, 2]
    assert "validate/success_once" in metrics[2]
    assert metrics[2]["validate/policy_version"] == 2
    assert "validate/success_once" not in metrics[1].keys() | metrics[3].keys()
    resumed, later = fit(tmp_path, policy(), 4, ckpt_path="last", trainer=trainer)
    assert [int(row["step"]) for row in rows_of(resumed) if row["validate/success_once"]] == [4]
    assert sorted(later) == [4]


class Drifting(PPO):
    """An objective whose KL is a number of its own."""

    kl = (0.0, 0.0, 0.5, 0.0, 0.0, 0.0)

    def __call__(self, policy: VLAPolicy, batch: Any) -> StepOutput:
        output = super().__call__(policy, batch)
        count = torch.tensor(float(output.num_samples))
        self.calls = getattr(self, "calls", 0) + 1
        kl = torch.tensor(self.kl[(self.calls - 1) % len(self.kl)])
        return StepOutput(output.loss, output.num_samples, dict(output.metrics) | {"ppo/approx_kl": (kl * count, count)})


def test_target_kl_ends_an_update_early(tmp_path: Path) -> None:
    """After the optimizer step that went too far, not at the end of its epoch; the next update starts as usual."""
    learner = TinyVLAPolicy(Drifting(target_kl=0.1), hidden=(16, 16), vocab_size=64, instruction_dim=4)
    runner, _ = fit(tmp_path, learner, 1)
    assert runner.state.counters.optimizer_steps == 3
    assert runner.policy.objective is not None
    assert runner.policy.objective.state_dict()["updates"] == 1
    learner = TinyVLAPolicy(Drifting(target_kl=0.6), hidden=(16, 16), vocab_size=64, instruction_dim=4)
    assert fit(tmp_path, learner, 1)[0].state.counters.optimizer_steps == 6


class Recording(KnownPolicy):
    """Notes what each backward pass consumed."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = PPO(normalize_advantages=False)
        self.consumed: list[Tensor] = []
        self.modes: list[bool] = []

    def act(self, td: Any) -> Any:
        self.modes.append(self.training)
        return super().act(td)

    def training_step(self, batch: Any, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        self.consumed.append(batch["request_key"].flatten().clone())
        self.modes.append(self.training)
        return super().training_step(batch)


def test_every_decision_is_consumed_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    """Decisions left out or taken twice are a silent change of the algorithm."""
    learner = Recording()
    runner = make_trainer(
        tmp_path, fit_loop=SyncFitLoop(3, update_epochs=2, mini_batch_size=4, micro_batch_size=3), max_steps=1
    )
    runner.fit(learner, ClockEnvs(num_envs=2))
    assert [len(keys) for keys in learner.consumed] == [3, 1, 2, 3, 1, 2], "4 and 2 decisions, cut into 3 at most"
    epochs = [torch.cat(learner.consumed[:3]), torch.cat(learner.consumed[3:])]
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)
    assert len(epochs[0].unique()) == 6
    assert not torch.equal(epochs[0], epochs[1])
    assert learner.modes == [False] * (len(learner.modes) - 6) + [True] * 6, "acting without dropout, training with it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decisions_per_env": 0}, "fit_loop.decisions_per_env=0 must be at least 1"),
        ({"update_epochs": 0}, "fit_loop.update_epochs=0 must be at least 1"),
        ({"mini_batch_size": 0}, "fit_loop.mini_batch_size=0 must be at least 1"),
        (
            {"micro_batch_size": 9, "mini_batch_size": 8},
            "fit_loop.micro_batch_size=9 is larger than fit_loop.mini_batch_size=8",
        ),
        ({"max_grad_norm": 0.0}, "fit_loop.max_grad_norm=0.0 must be positive, or null"),
        ({"env_timeout_s": -1.0}, "fit_loop.env_timeout_s=-1.0 must be positive"),
        ({"env_timeout_s": float("nan")}, "fit_loop.env_timeout_s=nan must be positive"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        SyncFitLoop(**options)


@pytest.mark.parametrize("name", ["mini_batch_size", "micro_batch_size"])
def test_batches_larger_than_the_global_batch_are_refused(tmp_path: Path, name: str) -> None:
    """Which only the env's size and the loop's together tell; before any env is built or directory made."""
    runner = make_trainer(tmp_path / "runs", fit_loop=SyncFitLoop(decisions_per_env=4, **{name: 9}))
    message = rf"fit_loop.{name}=9 is larger than the global batch of 8 decisions \(env.num_envs=2 times .*=4\)"
    with pytest.raises(ValueError, match=message):
        runner.fit(policy(), ClockEnvs(num_envs=2, fault="raise-in-build"))
    assert not (tmp_path / "runs").exists()


def test_a_policy_without_an_objective_is_refused(tmp_path: Path) -> None:
    """With the setting that is missing."""
    with pytest.raises(ValueError, match=r"model.objective is not set; fit needs one"):
        make_trainer(tmp_path).fit(tiny(objective=None), ClockEnvs(fault="raise-in-build"))


def test_more_tasks_than_envs_are_refused(tmp_path: Path) -> None:
    """Else the tasks past the last env would never be trained on, and nobody told."""
    with pytest.raises(ValueError, match=r"env.num_envs=2 envs cannot train on 3 tasks"):
        make_trainer(tmp_path).fit(policy(), ClockEnvs(num_envs=2, names=("a", "b", "c"), fault="raise-in-build"))
