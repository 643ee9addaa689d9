"""The rate that an engine without any overhead would reach: a simulation of the same queue in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from vla_async.collectors.shards import check_counts
from vla_async.emulation.durations import Duration


def ideal_rate(
    num_envs: int,
    step_time: Duration,
    flat_s: float,
    per_row_s: float = 0.0,
    *,
    max_batch_size: int | None = None,
    chunk_size: int = 1,
    lockstep: bool = False,
    seconds: float = 300.0,
    seed: int = 0,
) -> float:
    """Env steps per second of envs that share one device, if nothing but their steps and its forwards took time.

    Whenever the device is free it answers all requests that wait, the oldest first and at most ``max_batch_size`` of them;
    an env whose request is answered executes its chunk and asks again.

    Args:
        num_envs: number of envs.
        step_time: time of one env step.
        flat_s: seconds per forward.
        per_row_s: seconds per row of a forward.
        max_batch_size: most rows of a forward; no limit by default.
        chunk_size: env steps per request.
        lockstep: all envs ask together, and wait for the slowest.
        seconds: virtual time to simulate; a tenth of it is left out at the start.
        seed: of the step times.

    Returns:
        Env steps per second; infinity if neither steps nor forwards take time.

    Raises:
        ValueError: for a number that is out of its range.
    """
    bmax = num_envs if max_batch_size is None else max_batch_size
    check_counts(num_envs=num_envs, max_batch_size=bmax, chunk_size=chunk_size)
    _check_costs(flat_s=flat_s, per_row_s=per_row_s)
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ValueError(f"seconds={seconds} must be positive")
    if step_time.mean == flat_s == per_row_s == 0.0:
        return math.inf
    generator = np.random.default_rng(seed)
    simulate = _lockstep if lockstep else _streaming

    def chunk_time() -> float:
        return sum(step_time.draw(generator) for _ in range(chunk_size))

    decisions, elapsed = simulate(num_envs, chunk_time, flat_s, per_row_s, bmax, seconds)
    return decisions * chunk_size / elapsed


def _check_costs(**costs: float) -> None:
    for name, cost in costs.items():
        if not (math.isfinite(cost) and cost >= 0.0):
            raise ValueError(f"{name}={cost} must be 0 or a positive number of seconds")


def _streaming(
    num_envs: int, chunk_time: Callable[[], float], flat_s: float, per_row_s: float, bmax: int, seconds: float
) -> tuple[int, float]:
    """Decisions answered after the warm-up, and the time that took."""
    arrivals = [(0.0, env) for env in range(num_envs)]  # a heap: when each env asks next
    now, warm_up, begin, answered = 0.0, 0.1 * seconds, math.nan, 0
    while now < seconds:
        now = max(now, arrivals[0][0])
        batch: list[int] = []
        while arrivals and arrivals[0][0] <= now and len(batch) < bmax:
            batch.append(heapq.heappop(arrivals)[1])
        now += flat_s + per_row_s * len(batch)
        for env in batch:
            heapq.heappush(arrivals, (now + chunk_time(), env))
        if not math.isnan(begin):
            answered += len(batch)
        elif now >= warm_up:
            begin = now
    return answered, now - begin


def _lockstep(
    num_envs: int, chunk_time: Callable[[], float], flat_s: float, per_row_s: float, bmax: int, seconds: float
) -> tuple[int, float]:
    forward = math.ceil(num_envs / bmax) * flat_s + num_envs * per_row_s
    now, answered = 0.0, 0
    while now < seconds:
        now += forward + max(chunk_time() for _ in range(num_envs))
        answered += num_envs
    return answered, now
