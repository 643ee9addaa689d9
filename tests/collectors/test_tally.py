"""Percentiles of what was counted in bins are those of the times themselves, to the width of a bin."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_async.collectors.tally import Tally, Totals, percentile, summary, time_bin


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_are_known_to_five_percent(times: list[float], share: float) -> None:
    counts = np.zeros(460, np.int64)
    for time in times:
        counts[time_bin(time)] += 1
    exact = float(np.sort(times)[max(0, math.ceil(share * len(times)) - 1)])
    assert abs(percentile(counts, share) - exact) <= 0.051 * exact


def test_times_out_of_range_are_kept_at_the_ends() -> None:
    assert time_bin(0.0) == 0
    assert time_bin(1e9) == 459
    assert math.isnan(percentile(np.zeros(460, np.int64), 0.5))


def test_the_summary_adds_up_replicas_of_different_size() -> None:
    small, large = Tally(2), Tally(4)
    small.add(2, [0.001, 0.003], 0.010, waiting=1)
    large.add(4, [0.002] * 4, 0.030, waiting=0)
    small.seconds[1], large.seconds[1] = 0.1, 0.1
    stats = summary([small, large])
    assert stats["batch_size/histogram"] == [0, 0, 1, 0, 1]
    assert stats["batch_size/mean"] == 3.0
    assert stats["decisions"] == 6
    assert stats["queue/mean_rows"] == 0.5
    assert math.isclose(stats["replica/idle_share"], 1.0 - 0.04 / 0.2)
    assert 0.0019 < stats["request_wait_s/p50"] < 0.0021


def test_nothing_counted_is_no_number() -> None:
    stats = summary([Tally(3)])
    assert math.isnan(stats["batch_size/mean"])
    assert stats["decisions"] == 0


def test_a_difference_knows_only_what_came_between() -> None:
    """Long waits of the past would hide that the present is short, and the other way round."""
    tally = Tally(6)
    for _ in range(100):
        tally.add(6, [1.0] * 6, 2.0, waiting=0)
    before = Totals.of([tally])
    tally.add(1, [0.001], 0.010, waiting=0)
    for rows in (2, 3, 4, 5):
        tally.add(rows, [0.001] * rows, 0.010, waiting=0)
    tally.add(0, [0.001], 0.010, waiting=0)
    update = Totals.of([tally]) - before
    metrics = update.metrics()
    assert metrics["batch_size/mean"] == 3.0, "a batch without a row is none"
    assert metrics["request_wait_s/p99"] == pytest.approx(0.001, rel=0.06)
    assert metrics["forward_s/p95"] == pytest.approx(0.010, rel=0.06)
    expected = {1: 0.2, 2: 0.2, 4: 0.4, 8: 0.2}
    assert update.shares() == {f"batch_size/share_{n}": share for n, share in expected.items()} | {"batch_size/limit": 6.0}
    assert float(update.seconds[0]) == pytest.approx(0.06)


def test_an_update_without_a_batch_has_no_percentiles() -> None:
    tally = Tally(1)
    tally.add(1, [1.0], 1.0, waiting=0)
    update = Totals.of([tally]) - Totals.of([tally])
    assert update.shares().keys() == {"batch_size/share_1", "batch_size/limit"}
    assert all(math.isnan(value) for name, value in (update.metrics() | update.shares()).items() if "limit" not in name)
