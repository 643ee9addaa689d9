"""The comparison of the loops: its statistics by worked numbers, the age of its data, and that it can be continued."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_report, learning_run, sample_efficiency
from benchmarks.learning_cases import TASKS, Setting, sweep


def record(seed: int, rates: list[float], eta: int = 0, correction: str = "none", pace: str = "full_age") -> dict[str, Any]:
    """A run of 10 episodes per mark, with marks 1,000 env steps and a second apart."""
    points = [
        {
            "mark": 1000 * i,
            "env_steps": 1000 * i,
            "updates": i,
            "wall_s": float(i),
            "successes": round(10 * r),
            "episodes": 10,
        }
        for i, r in enumerate(rates)
    ]
    setting = dataclasses.asdict(Setting("toy_ppo", eta, correction, seed, pace))  # type: ignore[arg-type]
    return {**setting, "staleness_mean": float(eta), "staleness_max": float(eta), "points": points}


def test_a_band_is_students_interval() -> None:
    """Five values with a deviation of sqrt(0.025): half the width is 2.776 * sqrt(0.025 / 5)."""
    found = learning_report.band([0.1, 0.2, 0.3, 0.4, 0.5])
    half = 2.776 * math.sqrt(0.005)
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert learning_report.band([0.5]) == learning_report.Band(0.5, -math.inf, math.inf)


def test_the_band_of_a_success_rate_has_a_width_where_all_seeds_agree() -> None:
    """500 successes of 500 fit a rate of 500 / (500 + z²), too; without that, 0.99 would count as worse than 1."""
    found = learning_report.success_band([100] * 5, 100)
    assert found.high == found.mean == 1.0
    assert found.low == pytest.approx(500 / (500 + 1.959964**2))
    assert learning_report.success_band([0, 10], 10) == learning_report.Band(0.5, 0.0, 1.0)  # never outside of [0, 1]


def test_the_area_is_the_mean_success_between_the_marks() -> None:
    """Marks that lie unevenly weigh by what lies between them: (1 * 0.25 + 2 * 0.75) / 3."""
    points = record(0, [0.0, 0.5, 1.0])["points"]
    points[2]["mark"] = 3000
    assert learning_report.area(points) == pytest.approx(1.75 / 3)


def test_the_difference_is_paired_by_seed() -> None:
    """Seeds that differ widely from each other must not hide that each is worse by the same amount."""
    sync = [record(seed, [level, level]) for seed, level in enumerate((0.2, 0.9, 0.5))]
    worse = [record(seed, [level - 0.1, level - 0.1], eta=1) for seed, level in enumerate((0.2, 0.9, 0.5))]
    found = learning_report.difference(worse[:2], sync)  # the third has no partner yet
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))
    with pytest.raises(ValueError, match="no seed in common"):
        learning_report.difference(worse[2:], sync[:2])


def test_the_verdict_says_which_eta_is_inside_and_where_it_degrades() -> None:
    """A wrong verdict here would end up in the documentation."""
    sync = [record(seed, [0.5 + 0.1 * seed] * 3) for seed in range(3)]
    same = [record(seed, [0.5 + 0.1 * (2 - seed)] * 3, eta=1) for seed in range(3)]
    bad = [record(seed, [0.1 + 0.1 * seed] * 3, eta=4) for seed in range(3)]
    found = learning_report.curves([*bad, *same, *sync])
    assert [curve.name for curve in found] == ["synchronous", "η = 1", "η = 4"]
    said = learning_report.verdicts(found)
    assert said[0].startswith("η = 1: area 0.60 inside the synchronous band 0.60")
    assert said[1].startswith("η = 4: area 0.20 below")
    assert said[2] == "correction none: degrades from η = 4"
    assert learning_report.verdicts(found[:2])[-1] == "correction none: does not degrade up to η = 1"
    row = learning_report.learning_table("toy", found).rows[2]
    assert row[-4:] == ["-0.40 [-0.40, -0.40]", "0 of 2", "4.00", "4.00"]


def test_seconds_are_compared_between_runs_as_users_have_them() -> None:
    """Runs that wait for old data on purpose say nothing about speed, so they must not get into that table."""
    slow, fast = record(0, [0.0, 1.0, 1.0], pace="free"), record(0, [0.0, 1.0, 1.0], eta=1, pace="free")
    fast["points"][-1]["wall_s"] = 1.6
    found = learning_report.curves([slow, fast, record(0, [0.0, 0.0, 0.0], eta=1)], "free")
    assert [curve.name for curve in found] == ["synchronous", "η = 1"]
    rows = learning_report.wall_clock_table("toy", found).rows
    assert [row[6] for row in rows] == ["1.00", "1.25"]


def test_all_settings_have_their_first_seed_before_any_has_its_second() -> None:
    """A comparison that is stopped half-way must be one of all settings."""
    found = sweep(["toy_ppo"], [0, 1], [1, 2], ["none", "decoupled"])
    assert [setting.seed for setting in found] == [0] * 5 + [1] * 5
    assert [setting.name for setting in found[:5]] == [
        "synchronous",
        "η = 1",
        "η = 1, decoupled",
        "η = 2",
        "η = 2, decoupled",
    ]
    timed = sweep(["toy_ppo"], [0, 1], [1], ["decoupled"], "free")
    assert [(setting.eta, setting.pace) for setting in timed] == [(0, "free"), (1, "free")] * 2


@pytest.mark.parametrize("name", TASKS)
def test_every_task_makes_a_loop_for_every_setting(name: str) -> None:
    """Settings that a loop refuses would be found out only in the middle of the comparison."""
    for setting in sweep([name], [0], [1, 8], ["none", "decoupled", "truncated_is"]):
        assert TASKS[name].loop(setting).stage == "fit"
        TASKS[name].policy(setting.correction)
    assert len(TASKS[name].marks) >= 2


def test_all_data_is_as_old_as_the_bound_allows(tmp_path: Path) -> None:
    """If a machine with slow rollouts could keep the data fresh, the comparison would not say what staleness does."""
    found = learning_run.run(TASKS["smoke"], Setting("smoke", 2, "none", 0), tmp_path)
    assert found["staleness_mean"] == found["staleness_max"] == 2.0
    assert [point["mark"] for point in found["points"]] == [0, 16, 32]
    assert [point["updates"] for point in found["points"]] == [0, 2, 4]
    assert all(0 <= point["successes"] <= point["episodes"] == 2 for point in found["points"])


def test_the_comparison_runs_and_does_not_repeat_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run goes through a process of its own; what is in the file is kept."""
    file = tmp_path / "results.json"
    command = [
        "--tasks",
        "smoke",
        "--seeds",
        "0",
        "--etas",
        "1",
        "--corrections",
        "none",
        "--json",
        str(file),
        "--jobs",
        "2",
    ]
    sample_efficiency.main([*command, "--jobs", "2"])
    first = json.loads(file.read_text())
    assert sorted((found["eta"], found["staleness_max"]) for found in first) == [(0, 0.0), (1, 1.0)]
    sample_efficiency.main([*command, "--figure-dir", str(tmp_path / "figures"), "--markdown"])
    assert json.loads(file.read_text()) == first
    assert (tmp_path / "figures" / "learning_smoke.png").stat().st_size > 0
    assert "| η = 1 | 1 |" in capsys.readouterr().out


def test_a_run_that_fails_is_named_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One failure must not cost the other runs, and must not pass for a result."""

    def fail(setting: Setting, start: Path | None) -> dict[str, Any]:
        if setting.eta:
            raise RuntimeError("exit code 1: no disk")
        return record(setting.seed, [0.0, 1.0]) | {"task": setting.task}

    monkeypatch.setattr(sample_efficiency, "_run", fail)
    results = sample_efficiency.Results(tmp_path / "results.json")
    settings = sweep(["smoke"], [0], [1], ["none"])
    failures = sample_efficiency.run_all(settings, results, tmp_path, jobs=1)
    assert len(failures) == 1
    assert "no disk" in failures[0]
    again = sample_efficiency.Results(tmp_path / "results.json")
    assert [setting in again for setting in settings] == [True, False]
    assert "2/2 smoke η = 1 seed 0" in capsys.readouterr().out
