"""The formulas: their published examples, their invariants on any input, and the inputs that they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_async.core_math import async_speedup, dynamic_batches, size_weighted_mean_gradient

times = st.lists(st.floats(0.0, 500.0, allow_nan=False), max_size=60).map(sorted)
seconds = st.floats(0.0, 1e6, allow_nan=False)


def test_a_burst_leaves_in_full_batches_at_once() -> None:
    batches = dynamic_batches([0.0] * 12, 4, 20.0)
    assert [len(indices) for _, indices in batches] == [4, 4, 4]
    assert [time for time, _ in batches] == [0.0, 0.0, 0.0]


def test_sparse_requests_leave_alone_at_their_own_deadlines() -> None:
    """After an idle spell the clock starts at the new request, not at the last flush."""
    assert dynamic_batches([0.0, 100.0, 200.0], 4, 20.0) == [(20.0, [0]), (120.0, [1]), (220.0, [2])]


def test_a_request_at_the_very_deadline_misses_that_batch() -> None:
    assert dynamic_batches([0.0, 20.0], 4, 20.0) == [(20.0, [0]), (40.0, [1])]


def test_without_a_time_limit_a_batch_that_never_fills_never_leaves() -> None:
    assert dynamic_batches([0.0, 1.0, 2.0], 2, math.inf) == [(1.0, [0, 1])]


@given(times, st.integers(1, 9), st.floats(0.0, 50.0, allow_nan=False))
def test_every_request_is_served_once_in_order_in_time_and_in_a_legal_batch(
    arrivals: list[float], b_max: int, t_max: float
) -> None:
    batches = dynamic_batches(arrivals, b_max, t_max)
    assert [index for _, indices in batches for index in indices] == list(range(len(arrivals)))
    for time, indices in batches:
        assert 1 <= len(indices) <= b_max
        assert all(arrivals[index] <= time <= arrivals[index] + t_max for index in indices) or np.isclose(
            time, arrivals[indices[0]] + t_max
        )
        assert len(indices) == b_max or time == arrivals[indices[0]] + t_max  # no batch leaves early and short
    assert [time for time, _ in batches] == sorted(time for time, _ in batches)


@pytest.mark.parametrize(
    ("arrivals", "b_max", "t_max", "message"),
    [
        ([2.0, 1.0], 4, 1.0, r"arrivals\[1\]=1.0 is earlier"),
        ([0.0, math.nan], 4, 1.0, r"arrivals\[1\] is not finite"),
        ([math.inf], 4, 1.0, r"arrivals\[0\] is not finite"),
        ([[0.0]], 4, 1.0, "shape"),
        ([0.0], 0, 1.0, "b_max=0"),
        ([0.0], 4, -1.0, "t_max=-1.0"),
        ([0.0], 4, math.nan, "t_max=nan"),
    ],
)
def test_bad_arrivals_and_limits_are_refused(arrivals: list[float], b_max: int, t_max: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamic_batches(arrivals, b_max, t_max)


def test_the_speedup_of_known_cases() -> None:
    assert async_speedup(5, 5) == 2.0
    assert async_speedup(9, 1) == pytest.approx(10 / 9)
    assert async_speedup(7, 3) == pytest.approx(10 / 7)
    assert async_speedup(0, 3) == 1.0


@given(seconds, seconds)
def test_overlap_never_slows_down_and_never_more_than_doubles(rollout_s: float, train_s: float) -> None:
    if max(rollout_s, train_s) > 0.0:
        assert 1.0 <= async_speedup(rollout_s, train_s) <= 2.0
        assert async_speedup(rollout_s, train_s) == async_speedup(train_s, rollout_s)


@pytest.mark.parametrize(("rollout_s", "train_s"), [(-1.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (0.0, 0.0)])
def test_times_that_mean_nothing_are_refused(rollout_s: float, train_s: float) -> None:
    with pytest.raises(ValueError, match=r"rollout_s|train_s"):
        async_speedup(rollout_s, train_s)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0), st.integers(0, 10_000))
def test_any_split_gives_the_gradient_of_one_batch(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(sum(sizes), 6)), generator.normal(size=sum(sizes))
    w = generator.normal(size=6)

    def gradient(rows: np.ndarray) -> np.ndarray:
        return 2.0 / len(rows) * x[rows].T @ (x[rows] @ w - y[rows])

    chunks = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    np.testing.assert_allclose(size_weighted_mean_gradient(gradient, chunks), gradient(np.arange(sum(sizes))), atol=1e-10)


def test_the_mean_of_means_is_another_gradient() -> None:
    """If this failed, the weighting would not matter and the test above would prove nothing."""
    data = [np.array([0.0, 0.0, 0.0]), np.array([4.0])]
    assert size_weighted_mean_gradient(np.mean, data) == pytest.approx(1.0)
    assert np.mean([np.mean(chunk) for chunk in data]) == pytest.approx(2.0)


def test_gradients_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(ValueError, match="no sample"):
        size_weighted_mean_gradient(np.mean, [[], []])
    with pytest.raises(ValueError, match=r"chunks\[1\] is not finite"):
        size_weighted_mean_gradient(np.mean, [[1.0], [math.nan]])
    with pytest.raises(ValueError, match=r"chunks\[1\] has shape"):
        size_weighted_mean_gradient(np.asarray, [[1.0], [1.0, 2.0]])
