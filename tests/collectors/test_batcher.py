"""The batcher in virtual time: no clock, no sleeping, every stream of arrivals that hypothesis can think of."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_async.collectors.batcher import DynamicBatcher, Share
from vla_async.core_math import dynamic_batches

times = st.lists(st.floats(0.0, 100.0, allow_nan=False), max_size=50).map(sorted)
sizes = st.integers(1, 9)
waits = st.one_of(st.just(0.0), st.floats(0.0, 30.0, allow_nan=False))
Batch = tuple[float, list[Share[int]]]


def drive(arrivals: list[float], rows: list[int], b_max: int, t_max: float) -> list[Batch]:
    """What a driver with replicas that are always free does."""
    batcher: DynamicBatcher[int] = DynamicBatcher(b_max, t_max)
    batches: list[Batch] = []

    def take(now: float) -> None:
        while (batch := batcher.pop_due(now)) is not None:
            batches.append((now, batch))

    for index, now in enumerate([*arrivals, math.inf]):
        while (deadline := batcher.next_deadline()) is not None and deadline <= now and deadline < math.inf:
            take(deadline)
        if now < math.inf:
            batcher.put(index, now, rows[index])
            take(now)
    return batches


@given(times, sizes, waits)
def test_it_agrees_with_the_formula(arrivals: list[float], b_max: int, t_max: float) -> None:
    batches = drive(arrivals, [1] * len(arrivals), b_max, t_max)
    assert [(now, [share.request for share in batch]) for now, batch in batches] == dynamic_batches(arrivals, b_max, t_max)


@given(st.lists(st.tuples(st.floats(0.0, 100.0, allow_nan=False), st.integers(1, 12)), max_size=40), sizes, waits)
def test_rows_leave_once_in_order_in_time_and_never_too_many(
    requests: list[tuple[float, int]], b_max: int, t_max: float
) -> None:
    requests.sort(key=lambda request: request[0])
    arrivals, rows = [request[0] for request in requests], [request[1] for request in requests]
    batches = drive(arrivals, rows, b_max, t_max)
    left = [(share.request, row) for _, batch in batches for share in batch for row in range(share.start, share.stop)]
    assert left == [(index, row) for index, count in enumerate(rows) for row in range(count)]
    for now, batch in batches:
        size = sum(share.stop - share.start for share in batch)
        assert 1 <= size <= b_max
        assert size == b_max or now == arrivals[batch[0].request] + t_max
        assert all(arrivals[share.request] <= now <= arrivals[share.request] + t_max for share in batch)


@given(times, sizes, waits, st.floats(0.1, 20.0, allow_nan=False))
def test_behind_a_busy_replica_nobody_is_overtaken(arrivals: list[float], b_max: int, t_max: float, forward: float) -> None:
    """One replica that is busy for ``forward`` seconds per batch: what is overdue leaves the moment it is free again."""
    batcher: DynamicBatcher[int] = DynamicBatcher(b_max, t_max)
    free, now, served, index = 0.0, 0.0, list[int](), 0
    while index < len(arrivals) or len(batcher):
        deadline = batcher.next_deadline()
        start = math.inf if deadline is None else max(free, deadline, now)
        if index < len(arrivals) and arrivals[index] < start:
            now = arrivals[index]
            batcher.put(index, now)
            index += 1
            continue
        assert start <= max(free, arrivals[len(served)] + t_max)
        batch = batcher.pop_due(start)
        assert batch is not None
        now = start
        served += [share.request for share in batch]
        free = start + forward
    assert served == list(range(len(arrivals)))


def test_the_clock_starts_at_the_oldest_request_after_an_idle_spell() -> None:
    """An engine whose clock ran on while nothing waited would flush the first request alone, at once."""
    batcher: DynamicBatcher[str] = DynamicBatcher(8, 5.0)
    assert batcher.next_deadline() is None
    batcher.put("a", now=1000.0)
    assert batcher.pop_due(1004.9) is None
    assert batcher.next_deadline() == 1005.0
    assert batcher.pop_due(1005.0) == [Share("a", 0, 1)]


def test_a_request_that_is_too_large_is_cut_and_its_rest_keeps_its_place_and_time() -> None:
    batcher: DynamicBatcher[str] = DynamicBatcher(4, 10.0)
    batcher.put("simulator", now=0.0, rows=6)
    assert batcher.pop_due(0.0) == [Share("simulator", 0, 4)]
    assert batcher.pop_due(0.0) is None
    batcher.put("env", now=3.0)
    assert batcher.next_deadline() == 10.0
    assert batcher.pop_due(10.0) == [Share("simulator", 4, 6), Share("env", 0, 1)]
    assert len(batcher) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"max_batch_size={size}"):
        DynamicBatcher(size, 1.0)


@pytest.mark.parametrize("wait", [-0.1, math.nan])
def test_a_wait_that_is_no_time_is_refused(wait: float) -> None:
    with pytest.raises(ValueError, match="max_wait_s"):
        DynamicBatcher(1, wait)


def test_a_clock_that_runs_backwards_and_an_empty_request_are_refused() -> None:
    batcher: DynamicBatcher[str] = DynamicBatcher(4, 1.0)
    batcher.put("a", now=2.0)
    with pytest.raises(ValueError, match="backwards"):
        batcher.put("b", now=1.0)
    with pytest.raises(ValueError, match="backwards"):
        batcher.pop_due(math.nan)
    with pytest.raises(ValueError, match="rows=0"):
        batcher.put("b", now=2.0, rows=0)
