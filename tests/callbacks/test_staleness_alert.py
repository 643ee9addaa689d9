"""StalenessAlert: when it speaks up, and what it does then."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import ClockEnvs, make_trainer
from tests.loops.streaming_fakes import SpyGRPO, fit, known
from vla_async.callbacks import StalenessAlert
from vla_async.loops import SyncFitLoop
from vla_async.objectives import PPO


def alerts(alert: StalenessAlert, *updates: dict[str, float]) -> list[int]:
    """The numbers of the updates, from 1, after which it warned."""
    found = []
    for step, metrics in enumerate(updates, start=1):
        trainer: Any = SimpleNamespace(state=SimpleNamespace(counters=SimpleNamespace(step=step), stopped=False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            alert.on_step_end(trainer, metrics)
        if caught:
            found.append(step)
            assert f"update {step}" in str(caught[0].message)
    return found


@pytest.mark.parametrize(
    ("setting", "metric"),
    [
        ("mean_staleness", "staleness/mean"),
        ("max_staleness", "staleness/max"),
        ("log_prob_gap", "ppo/log_prob_gap"),
        ("log_prob_gap", "grpo/log_prob_gap"),
        ("kl", "ppo/approx_kl"),
        ("kl", "grpo/approx_kl"),
    ],
)
def test_a_threshold_is_exceeded_only_above_it(setting: str, metric: str) -> None:
    alert = StalenessAlert(**{setting: 0.5})
    assert alerts(alert, {metric: 0.5}, {metric: 0.6}, {}, {metric: float("nan")}, {metric: 0.7}) == [2, 5]


def test_patience_wants_updates_in_a_row_and_starts_anew_after_an_alert() -> None:
    high, low = {"staleness/mean": 2.0}, {"staleness/mean": 0.0}
    assert alerts(StalenessAlert(mean_staleness=1.0, patience=2), high, low, high, high, high, high) == [4, 6]


def test_success_and_return_that_stay_the_same_are_no_signal() -> None:
    def update(success: float, returned: float) -> dict[str, float]:
        return {"rollout/success_once": success, "rollout/return": returned}

    alert = StalenessAlert(no_signal_updates=3)
    same, other = update(0.0, -1.0), update(0.0, -0.9)
    assert alerts(alert, same, same, other, other, {}, other, same) == [6]


def test_groups_that_are_all_equal_are_no_signal() -> None:
    equal, mixed = {"grpo/groups": 4.0, "grpo/equal_groups": 4.0}, {"grpo/groups": 4.0, "grpo/equal_groups": 3.0}
    assert alerts(StalenessAlert(no_signal_updates=2), equal, mixed, equal, equal, equal) == [4]


def test_it_stops_a_run_and_says_why(tmp_path: Path) -> None:
    """The run ends as one whose budget is spent: with its last checkpoint, and without an error."""
    alert = StalenessAlert(no_signal_updates=2, action="stop")
    envs = ClockEnvs(num_envs=2, max_episode_steps=4)
    policy = known(SpyGRPO(group_size=2, outcome="success_once"))
    with pytest.warns(UserWarning, match=r"update 2: all groups of 2 updates had equal outcomes; the run stops"):
        trainer, steps = fit(tmp_path, policy, envs, alert, max_steps=20)
    assert sorted(steps) == [1, 2]
    assert (trainer.run.checkpoints / "last.ckpt").exists()


def test_it_lowers_the_bound_until_it_cannot(tmp_path: Path) -> None:
    alert = StalenessAlert(max_staleness=0.0, action="lower")
    with pytest.warns(UserWarning, match="staleness/max") as caught:
        _, steps = fit(
            tmp_path, known(PPO()), ClockEnvs(num_envs=4), alert, max_steps=12, max_staleness=3, fragments_per_update=2
        )
    bounds = [steps[step]["staleness/bound"] for step in sorted(steps)]
    assert bounds[0] == 3.0
    assert bounds[-1] == 1.0, "with less, 4 envs have no room in batches of 2"
    assert bounds == sorted(bounds, reverse=True)
    said = [str(warning.message) for warning in caught if "max_staleness" in str(warning.message)]
    assert "max_staleness is now 2" in said[0]
    assert "max_staleness is now 1" in said[1]
    assert len(said) == 3, "what does not change is said once"
    assert "max_staleness stays 1" in said[2]


def test_it_says_once_that_a_bound_of_0_cannot_be_lowered(tmp_path: Path) -> None:
    alert = StalenessAlert(kl=0.0, action="lower")
    with pytest.warns(UserWarning, match="kl") as caught:
        fit(tmp_path, known(PPO()), ClockEnvs(num_envs=4), alert, max_steps=6, max_staleness=1, update_epochs=2)
    said = [str(warning.message).partition("max_staleness ")[2] for warning in caught]
    assert [text for text in said if text] == ["is now 0", "stays 0: there is no lower one"]


def test_it_refuses_to_lower_what_a_loop_does_not_have(tmp_path: Path) -> None:
    alert = StalenessAlert(mean_staleness=1.0, action="lower")
    trainer = make_trainer(tmp_path, fit_loop=SyncFitLoop(), callbacks=[alert], max_steps=1)
    with pytest.raises(ValueError, match=r"action='lower': SyncFitLoop has no max_staleness; use StreamingFitLoop"):
        trainer.fit(known(PPO()), ClockEnvs())
    assert not list(tmp_path.iterdir()), "nothing was started for it"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"has no threshold; set one of mean_staleness"),
        ({"kl": -0.1}, r"kl=-0.1 must not be negative"),
        ({"log_prob_gap": float("nan")}, r"log_prob_gap=nan"),
        ({"no_signal_updates": 1}, r"no_signal_updates=1 must be 0 \(never\) or at least 2"),
        ({"kl": 0.1, "patience": 0}, r"patience=0 must be at least 1"),
        ({"kl": 0.1, "action": "panic"}, r"action='panic': choose warn, stop or lower"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StalenessAlert(**settings)
