"""Columns for charts: what is not finite is a gap, and long runs are drawn by representative points."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.report.runs import update
from vla_async.monitor import metric_table as m
from vla_async.report.columns import Columns, sampled
from vla_async.report.run_data import RunData


def test_what_is_no_finite_number_is_a_gap() -> None:
    """NaN and infinity are no JSON: a page with them would draw nothing at all."""
    lines = [{"lr": 1.0}, {"lr": math.nan}, {"lr": math.inf}, {}]
    columns = Columns(lines)
    assert columns.values("lr") == [1.0, None, None, None]
    assert columns.values("lr", complement=True) == [0.0, None, None, None]
    assert Columns([{"lr": math.nan}]).names == []


def test_a_short_run_is_drawn_as_it_is() -> None:
    columns = Columns([update(step) for step in (1, 2, 3)], limit=3)
    assert columns.lines_per_point == 1
    assert columns.x() == {"step": [1, 2, 3], "env_steps": [500, 1000, 1500], "elapsed_s": [1.5, 3.0, 4.5]}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("time/update_s", [2.0, 5.0, 7.0]),  # means
        ("staleness/max", [3.0, 6.0, 7.0]),  # the largest, which is what is looked for
        ("staleness/min", [1.0, 4.0, 7.0]),
        ("env_steps", [3.0, 6.0, 7.0]),  # where a point's updates end
    ],
)
def test_a_long_run_is_drawn_by_groups_of_lines(name: str, values: list[float]) -> None:
    lines = [{name: float(number)} for number in range(1, 8)]
    assert Columns(lines, limit=3).values(name) == values


def test_a_gap_does_not_count_in_a_group() -> None:
    lines = [{"lr": 1.0}, {"lr": math.nan}, {}, {}]
    assert Columns(lines, limit=2).values("lr") == [1.0, None]


def test_names_are_matched_by_the_metric_table() -> None:
    columns = Columns([{"ppo/approx_kl": 1.0, "queue/dropped/too old": 1.0, "other": 1.0}])
    assert columns.matching(m.APPROX_KL) == {"ppo/approx_kl": {"objective": "ppo"}}
    assert columns.matching(m.DROPPED) == {"queue/dropped/too old": {"reason": "too old"}}


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["runs/a/1", "runs/b/1"], ["a", "b"]),
        (["runs/a/1", "runs/a/2"], ["1", "2"]),
        (["runs/a/1", "runs/a/2", "runs/b/1"], ["a/1", "a/2", "b/1"]),
        (["x/a/1", "y/a/1"], ["x/a/1", "y/a/1"]),
    ],
)
def test_labels_tell_runs_apart_and_are_short(paths: list[str], labels: list[str]) -> None:
    assert [run.label for run in sampled([RunData(Path(path), [], []) for path in paths])] == labels
