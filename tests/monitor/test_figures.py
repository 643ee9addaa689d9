"""Figures of runs: which updates count, how shares weigh, and what the table shows."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from vla_async.monitor.figures import Figures, ablation_table, median, read_figures


def test_rates_and_shares_are_those_of_the_updates_after_the_first(tmp_path: Path) -> None:
    """Shares weigh by time, the rate is all env steps over all the time, and what was never logged is no number."""
    path = tmp_path / "metrics.csv"
    lines = [
        {"validate/success_once": 0.1},
        {"time/env_steps_per_s": 1, "env_steps": 10, "elapsed_s": 5, "time/update_s": 5, "trainer/idle_share": 0.9},
        {"time/env_steps_per_s": 1, "env_steps": 20, "elapsed_s": 6, "time/update_s": 1, "trainer/idle_share": 0.8},
        {"time/env_steps_per_s": 1, "env_steps": 30, "elapsed_s": 9, "time/update_s": 3, "trainer/idle_share": 0.0},
    ]
    lines[2]["staleness/max"], lines[3]["staleness/max"], lines[3]["validate/success_once"] = 2, 1, 0.5
    with path.open("w") as file:
        writer = csv.DictWriter(file, sorted({name for line in lines for name in line}))
        writer.writeheader()
        writer.writerows(lines)
    found = read_figures(path, skip=1)
    assert (found.env_steps_per_s, found.update_s, found.trainer_idle) == (5.0, 2.0, pytest.approx(0.2))
    assert (found.staleness_max, found.success) == (2.0, 0.5)
    assert math.isnan(found.replica_idle)
    assert math.isnan(found.last_arrival_to_step_s)


def test_the_table_shows_medians_relative_to_the_first_row() -> None:
    def run(rate: float) -> Figures:
        return Figures(rate, 1.0, 0.1, math.nan, 0.25, 0.5, 0.75, 1.0, 2.0, math.nan)

    results = {"first": [run(100.0), run(90.0), run(500.0)], "second": [run(150.0)]}
    assert median(results["first"]).env_steps_per_s == 100.0
    rows = ablation_table(results, "title").rows
    assert rows[0] == ["first", "100.0", "+0%", "25%", "50%", "75%", "1.00", "2", "–"]
    assert rows[1][1:3] == ["150.0", "+50%"]
