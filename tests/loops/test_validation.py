"""Validation beside training: the same results, without anybody waiting for them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, KnownPolicy, equal, is_running, make_trainer, tiny
from tests.loops.validation_fakes import At, Results, await_evaluation, gated
from vla_async.callbacks import Callback, Checkpoint, SuccessPlot
from vla_async.envs import EnvFactory, ToyEnvs
from vla_async.loops import EvaluateLoop, StreamingFitLoop, SyncFitLoop
from vla_async.loops import evaluation_process as module
from vla_async.loops.base import Loop
from vla_async.loops.validation import BesideTraining
from vla_async.objectives import PPO
from vla_async.policies import VLAPolicy
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer

LOOPS: dict[str, Any] = {
    "sync": lambda: SyncFitLoop(decisions_per_env=3, update_epochs=1),
    "streaming": lambda: StreamingFitLoop(decisions_per_env=3, update_epochs=1, max_staleness=1),
}


def fit(
    root: Path,
    *callbacks: Callback,
    env: EnvFactory,
    policy: VLAPolicy | None = None,
    ckpt_path: str | None = None,
    loop: Loop | None = None,
    evaluate: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncTrainer:
    """Train with validation beside it, unless said otherwise."""
    evaluation = EvaluateLoop(**({"num_episodes": 2, "num_videos": 0, "beside_training": True} | dict(evaluate or {})))
    options = {"max_steps": 2, "val_every_n_steps": 2, "num_threads": 1} | options
    trainer = make_trainer(
        root, fit_loop=loop or LOOPS["sync"](), evaluate_loop=evaluation, callbacks=[*callbacks], **options
    )
    trainer.fit(tiny(lr=1e-2) if policy is None else policy, env, ckpt_path=ckpt_path)
    return trainer


def rows(trainer: AsyncTrainer) -> list[dict[str, str]]:
    """The lines of metrics.csv that hold a validation."""
    with (trainer.run.path / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("validate/episodes")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_results_are_those_of_validation_in_turn(tmp_path: Path, precision: str) -> None:
    """Episode by episode and bit by bit: a figure must not depend on who computed it."""
    found = []
    for beside in (False, True):
        results = Results()
        options = {"num_episodes": 3, "deterministic": False, "beside_training": beside}
        env = ToyEnvs(num_envs=2, chunk_size=2, max_episode_steps=8)
        trainer = fit(tmp_path / str(beside), results, env=env, evaluate=options, precision=precision)
        assert results.versions == [0, 2]
        found.append((results, trainer, rows(trainer)))
    (turn, first, logged), (beside_it, second, logged_too) = found
    assert [result.episodes for result in turn.all] == [result.episodes for result in beside_it.all]
    assert turn.all[0].episodes != turn.all[1].episodes, "the weights made no difference, so the test shows nothing"
    assert [result.env_steps for result in turn.all] == [result.env_steps for result in beside_it.all] == [0, 12 * 2]
    assert equal(dict(first.policy.state_dict()), dict(second.policy.state_dict())), "training must not notice"
    for left, right in zip(logged, logged_too, strict=True):
        for name in ("step", "validate/policy_version", "validate/success_once", "validate/return"):
            assert left[name] == right[name]


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_go_on_while_an_evaluation_is_held(tmp_path: Path, loop: str) -> None:
    """It is still in its first episode when training has made its third step, so it has stopped nothing."""
    gate, results, seen = tmp_path / "gate", Results(), []

    def look(trainer: AsyncTrainer) -> None:
        await_evaluation(gate)
        seen.append((results.versions, trainer.validation.note, trainer.state.counters.env_steps))
        (gate / "open").touch()

    env = gated(gate)
    trainer = fit(tmp_path, results, At(3, look), env=env, loop=LOOPS[loop](), max_steps=4, val_every_n_steps=1000)
    [(versions, note, env_steps)] = seen
    assert versions == []
    assert note == "validating step 0: 0/2 episodes"
    assert env_steps > 0
    assert results.versions == [0]
    assert results.told_at[0] >= 3
    assert trainer.validation.note == ""


def test_of_those_that_wait_only_the_newest_is_evaluated(tmp_path: Path) -> None:
    """A slow evaluation must neither stall training nor fall behind it without end; what is left out is counted."""
    gate, results, plot = tmp_path / "gate", Results(), SuccessPlot()
    opening = At(4, lambda trainer: (await_evaluation(gate), (gate / "open").touch()))
    trainer = fit(tmp_path, results, plot, opening, env=gated(gate), max_steps=4, val_every_n_steps=1)
    assert results.versions == [0, 4]
    logged = rows(trainer)
    assert [row["step"] for row in logged] == ["0", "4"]
    assert [float(row["validate/policy_version"]) for row in logged] == [0, 4]
    assert [float(row["validate/skipped"]) for row in logged] == [3, 3]
    assert [float(row["env_steps"]) for row in logged] == [0, trainer.state.counters.env_steps]
    assert [point.env_steps for point in plot.points] == [0, trainer.state.counters.env_steps]


def everything(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds, but for clocks."""
    counters = {name: value for name, value in content["counters"].items() if name != "elapsed_s"}
    return {**content, "counters": counters}


def test_best_holds_what_was_evaluated_and_can_be_resumed_from(tmp_path: Path) -> None:
    """The weights of the third step have not been validated, so they are not the best that are known."""
    gate = tmp_path / "gate"
    opening = At(3, lambda trainer: (await_evaluation(gate), (gate / "open").touch()))
    saved = []
    watch = At(1, lambda trainer: saved.append(everything(trainer.state.finished)))
    env = gated(gate, success_at=3)
    options: dict[str, Any] = {"env": env, "max_steps": 4, "val_every_n_steps": 1000}
    whole = fit(tmp_path / "whole", opening, **options, policy=tiny(lr=1e-2))
    best = everything(read_checkpoint(whole.run.checkpoints / "best.ckpt"))
    assert best["counters"]["step"] == best["counters"]["env_steps"] == 0
    assert best["counters"]["best_success"] == 1.0
    last = read_checkpoint(whole.run.checkpoints / "last.ckpt")
    assert (last["counters"]["step"], last["counters"]["best_success"]) == (4, 1.0)
    assert not equal(best["state_dict"], last["state_dict"])
    resumed = fit(tmp_path / "resumed", watch, **options, ckpt_path=str(whole.run.checkpoints / "best.ckpt"))
    assert equal(dict(resumed.policy.state_dict()), last["state_dict"]), "another run than the one it was cut from"
    assert resumed.state.counters.step == 4
    assert len(saved) == 1


def test_best_in_turn_and_beside_are_the_same_checkpoint(tmp_path: Path) -> None:
    """Counters, optimizer, envs and random states included."""
    contents = []
    for beside in (False, True):
        trainer = fit(tmp_path / str(beside), env=ClockEnvs(success_at=3), evaluate={"beside_training": beside})
        contents.append(everything(read_checkpoint(trainer.run.checkpoints / "best.ckpt")))
    left, right = contents
    assert left["counters"]["step"] == 2
    for part in left:
        assert equal(left[part], right[part]), f"{part} differs"


def test_a_last_checkpoint_knows_of_the_validation_that_came_after_it(tmp_path: Path) -> None:
    """Else a run resumed from it would take a worse policy for its best."""
    gate = tmp_path / "gate"
    opening = At(2, lambda trainer: (await_evaluation(gate), (gate / "open").touch()))
    trainer = fit(tmp_path, Checkpoint(every_n_steps=1), opening, env=gated(gate, success_at=3))
    last = read_checkpoint(trainer.run.checkpoints / "last.ckpt")
    assert (last["counters"]["step"], last["counters"]["best_success"]) == (2, 1.0)


def test_a_callback_can_save_the_evaluated_state_or_the_current_one(tmp_path: Path) -> None:
    """Both are asked for, and must not be mistaken for each other."""
    gate = tmp_path / "gate"

    class Saving(Callback):
        def on_evaluation_end(self, trainer: AsyncTrainer, result: Any) -> None:
            trainer.validation.save(trainer, "evaluated")
            trainer.save_checkpoint("current")

    opening = At(2, lambda trainer: (await_evaluation(gate), (gate / "open").touch()))
    trainer = fit(tmp_path, Saving(), opening, env=gated(gate), val_every_n_steps=1000)
    trainer.validation.save(trainer, "afterwards")
    steps = {path.stem: read_checkpoint(path)["counters"]["step"] for path in trainer.run.checkpoints.iterdir()}
    assert steps == {"evaluated": 0, "current": 2, "afterwards": 2, "best": 0, "last": 2}


class Watch(Callback):
    """Notes the evaluation process, and whether it lives when the run has ended."""

    def on_start(self, trainer: AsyncTrainer) -> None:
        self.pids: list[int] = []

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        assert isinstance(trainer.validation, BesideTraining)
        assert trainer.validation._process is not None
        self.pids.append(trainer.validation._process.member.process.pid or 0)


def test_one_process_serves_a_whole_run_and_ends_with_it(tmp_path: Path) -> None:
    """Simulators are expensive to build; and another fit of the same trainer starts afresh."""
    watch, results = Watch(), Results()
    trainer = fit(tmp_path, watch, results, env=ClockEnvs(), evaluate={"num_videos": 1})
    assert len(set(watch.pids)) == 1
    assert not is_running(watch.pids[0])
    assert len(list(trainer.run.videos.glob("validate_00000[02]_*.mp4"))) == 2
    first = watch.pids[0]
    trainer.fit(tiny(), ClockEnvs())
    assert first not in watch.pids
    assert results.versions == [0, 2, 0, 2]


@pytest.mark.parametrize("every", [0, 5])
def test_what_is_not_due_is_not_evaluated(tmp_path: Path, every: int) -> None:
    """The schedule is the one of validation in turn: a resumed run does not validate where it starts."""
    results = Results()
    fit(tmp_path, env=ClockEnvs(), val_every_n_steps=0)
    fit(tmp_path, results, env=ClockEnvs(), val_every_n_steps=every, max_steps=4, ckpt_path="last")
    assert results.versions == []


def test_a_single_evaluation_takes_place_where_it_is_asked_for(tmp_path: Path) -> None:
    """``validate`` and ``test`` of the same recipe have no training to stay beside."""
    loop = EvaluateLoop(num_episodes=2, num_videos=0, beside_training=True)
    result = make_trainer(tmp_path, evaluate_loop=loop).validate(KnownPolicy(), ClockEnvs())
    assert result.success().n == 2


class Growing(KnownPolicy):
    """Its state_dict grows while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = PPO()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:  # type: ignore[override]
        self.register_buffer("more", torch.zeros(3))
        return super().training_step(batch)


def test_a_policy_that_changes_its_shape_is_an_error(tmp_path: Path) -> None:
    """Not weights that are silently left out, or a run that waits for ever."""
    with pytest.raises(RuntimeError, match=r"state_dict have changed .*evaluate_loop.beside_training=false"):
        fit(tmp_path, env=ClockEnvs(), policy=Growing())


class Talkative(KnownPolicy):
    """Its state_dict holds what no process can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = PPO()

    def get_extra_state(self) -> Any:
        return (number for number in range(3))

    def set_extra_state(self, state: Any) -> None:
        pass


def test_weights_that_cannot_be_handed_over_are_an_error(tmp_path: Path) -> None:
    """The thread that hands them over must not be the only one that knows."""
    with pytest.raises(RuntimeError, match="weights could not be handed to the evaluation process") as caught:
        fit(tmp_path, Checkpoint(every_s=0, save_last=False), env=ClockEnvs(), policy=Talkative(), max_steps=-1)
    assert "generator" in str(caught.value.__cause__)


def test_what_cannot_be_evaluated_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not hours later: too few envs for the tasks, no memory for the weights."""
    seen = Results()
    env = ClockEnvs(num_envs=2, names=("a", "b"), batched=True)
    with pytest.raises(ValueError, match=r"1 envs in one batch cannot run 2 tasks; set evaluate_loop.num_envs"):
        fit(tmp_path, seen, env=env, evaluate={"num_envs": 1})
    monkeypatch.setattr(module, "free_shared_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"evaluate_loop.beside_training needs .* bytes .* and 1,000 are free; enlarge"):
        fit(tmp_path, seen, env=ClockEnvs())
    assert seen.all == []


@pytest.mark.parametrize(
    ("device", "beside", "message"),
    [
        ("cpu", False, "evaluate_loop.device='cpu' is for evaluate_loop.beside_training=true"),
        ("gpu", True, "evaluate_loop.device='gpu': Expected one of cpu"),
        ("meta", True, "evaluate_loop.device='meta': choose cpu, or a CUDA device such as cuda:1"),
        ("cuda:9", True, "evaluate_loop.device='cuda:9' does not exist, torch sees"),
    ],
)
def test_impossible_devices_are_refused(device: str, beside: bool, message: str) -> None:
    """By field, value and fix, when the recipe is read."""
    with pytest.raises(ValueError, match=message):
        EvaluateLoop(device=device, beside_training=beside)
