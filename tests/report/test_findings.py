"""Findings: all rules together, and injected faults that are named in real runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.report.findings_fakes import make_run
from vla_async import AsyncTrainer
from vla_async.emulation import Constant, EmulatedEnvs, EmulatedVLAPolicy
from vla_async.loops import StreamingFitLoop, SyncFitLoop
from vla_async.objectives import PPO
from vla_async.report.findings import RULES, find
from vla_async.report.findings_base import Kind, setting
from vla_async.report.run_data import RunData, read_run

NAN = math.nan
# what everybody does in a run of which nothing bad is to be said: trainer and workers hardly wait
WELL = {"trainer/idle_share": 0.05, "worker/idle_share": 0.3, "worker/no_slot_share": 0.05, "replica/idle_share": 0.3}
LOGGED = (
    "time/update_s",
    "time/rollout_s",
    "batch_size/mean",
    "staleness/mean",
    "queue/produced",
    "rollout/return",
    "grpo/groups",
)


def test_problems_come_first() -> None:
    run = make_run(WELL | {"worker/restarts": 2.0, "queue/produced": 100.0, "queue/dropped/resume": 1.0})
    kinds = [finding.kind for finding in find(run)]
    assert kinds == ["problem", "note", "good"]
    assert kinds == sorted(kinds, key=get_args(Kind).index)


@pytest.mark.parametrize(
    "run",
    [
        RunData(Path("x"), [], []),
        make_run({}),
        make_run({"sft/nll": 1.0}),
        make_run(dict.fromkeys([*WELL, *LOGGED], NAN)),
    ],
    ids=["no updates", "no metrics", "sft", "nan"],
)
def test_what_was_not_logged_is_no_evidence(run: RunData) -> None:
    """A report of an unfinished or another kind of run must not fail, and not accuse anybody."""
    assert all(finding.kind == "note" for finding in find(run))


def test_a_setting_is_read_where_the_configuration_has_it() -> None:
    config = {
        "trainer": {"num_ranks": 2, "fit_loop": {"class_path": "x", "init_args": {"max_staleness": 3}}},
        "model": {"class_path": "y", "init_args": {"objective": {"class_path": "z", "init_args": {"target_kl": 0.1}}}},
        "env": {"class_path": "e", "init_args": {"num_envs": 8}},
    }
    run = make_run({}, config=config)
    names = ["trainer.num_ranks", "fit_loop.max_staleness", "objective.target_kl", "env.num_envs", "model.lr", "env.x.y"]
    assert [setting(run, name) for name in names] == [2, 3, 0.1, 8, None, None]
    assert setting(make_run({}), "env.num_envs") is None


def test_every_rule_has_its_line_on_the_page() -> None:
    """Whoever adds a rule tells the reader what it looks for."""
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert [rule.__name__ for rule in RULES if f"`{rule.__name__}`" not in page] == []


# ---------------------------------------------------------------------------------------------- injected faults

FAULTS = {
    "envs": "the environments are the bottleneck",
    "policy": "the policy is the bottleneck",
    "interaction": "this interaction is the bottleneck",
    "trainer": "the trainer is the bottleneck",
    "slots": "too few slots between them",
    "stale": "The data is stale",
    "signal": "no signal",
}
QUICK = {"act_flat_s": 0.001, "train_per_decision_s": 0.0005}


def fit(root: Path, costs: dict[str, float], step_s: float, horizon: int = 1000, **loop: Any) -> set[str]:
    """Train with emulated costs, and read from the run's files which of the faults are named."""
    settings = {"decisions_per_env": 3, "update_epochs": 1} | loop
    steps = settings.pop("max_steps", 12)
    fit_loop = settings.pop("kind", StreamingFitLoop)(**settings)
    trainer = AsyncTrainer(fit_loop=fit_loop, max_steps=steps, root_dir=root, num_threads=1, accelerator="cpu")
    policy = EmulatedVLAPolicy(PPO(), hidden=(8,), **costs)
    trainer.fit(policy, EmulatedEnvs(num_envs=4, chunk_size=2, step_time=Constant(step_s), max_episode_steps=horizon))
    text = "\n".join(finding.text for finding in find(read_run(trainer.run.path)))
    return {name for name, words in FAULTS.items() if words in text}


def test_slow_envs_are_named(tmp_path: Path) -> None:
    """A decision takes 50 ms in the env and 1 ms in the policy."""
    assert fit(tmp_path, QUICK, step_s=0.025) == {"envs"}


def test_a_slow_policy_is_named(tmp_path: Path) -> None:
    """A decision takes 2 ms in the env and 30 ms in the policy."""
    assert fit(tmp_path, QUICK | {"act_flat_s": 0.03}, step_s=0.001) == {"policy"}


def test_a_slow_trainer_is_named(tmp_path: Path) -> None:
    """An update takes 10 ms to roll out and 120 ms to train on."""
    assert fit(tmp_path, QUICK | {"train_per_decision_s": 0.01}, step_s=0.001) == {"trainer"}


def test_a_tiny_queue_is_named(tmp_path: Path) -> None:
    """Four envs have four slots. Two roll out (600 ms) while the others' are trained on (260 ms), and wait for theirs."""
    costs = QUICK | {"train_per_decision_s": 0.26 / 6}
    assert fit(tmp_path, costs, step_s=0.1, fragments_per_update=2, max_steps=8) == {"slots"}


def test_stale_data_is_named(tmp_path: Path) -> None:
    """While an env rolls out a fragment (360 ms), the policy moves far three times, on those of the others."""
    named = fit(tmp_path, QUICK | {"lr": 0.03}, step_s=0.06, fragments_per_update=1, max_staleness=5, max_steps=24)
    assert named == {"stale", "envs"}, "beside what is true of any run whose envs take so long"


def test_no_signal_is_named(tmp_path: Path) -> None:
    """Every episode has the same return."""
    assert fit(tmp_path, QUICK, step_s=0.0, horizon=4, kind=SyncFitLoop, decisions_per_env=4) == {"signal"}
