"""Percentiles of what was counted in bins are those of the times themselves, to the width of a bin."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vla_async.collectors.tally import Tally, percentile, summary, time_bin


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
