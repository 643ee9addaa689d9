"""The ideal rate: where it is known on paper, it is that; elsewhere it keeps to what no queue can break."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vla_async.emulation import Constant, LogNormal, Uniform, ideal_rate

JITTER = Uniform(0.002, 0.02)


@pytest.mark.parametrize(("num_envs", "rate"), [(8, 427.0), (16, 833.0), (32, 1601.0)])
def test_jittery_envs_reach_the_rates_that_the_goals_are_made_of(num_envs: int, rate: float) -> None:
    assert ideal_rate(num_envs, JITTER, 0.005, 0.0001, seconds=100.0) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    ("num_envs", "step_s", "flat_s", "options", "rate"),
    [
        (16, 0.0, 0.005, {}, 3200.0),  # all envs in every forward
        (16, 0.0, 0.005, {"max_batch_size": 8}, 1600.0),  # half of them
        (16, 0.0, 0.005, {"per_row_s": 0.005}, 16 / 0.085),
        (1, 0.01, 0.005, {}, 1 / 0.015),
        (1, 0.01, 0.005, {"chunk_size": 4}, 4 / 0.045),
        (4, 0.01, 0.0, {}, 400.0),  # a device that takes no time
    ],
)
def test_constant_times_give_the_rate_on_paper(
    num_envs: int, step_s: float, flat_s: float, options: dict[str, Any], rate: float, lockstep: bool
) -> None:
    found = ideal_rate(num_envs, Constant(step_s), flat_s, lockstep=lockstep, seconds=50.0, **options)
    assert found == pytest.approx(rate, rel=0.01)


def test_lockstep_waits_for_the_slowest() -> None:
    """The mean of the largest of two uniform times is two thirds of the way, so a round of both takes 2/3 s."""
    assert ideal_rate(2, Uniform(0.0, 1.0), 0.0, lockstep=True, seconds=5000.0) == pytest.approx(3.0, rel=0.03)
    heavy = LogNormal(0.02)
    assert ideal_rate(32, heavy, 0.005, seconds=60.0) > 2 * ideal_rate(32, heavy, 0.005, lockstep=True, seconds=60.0)


def test_the_device_bounds_the_rate_however_many_envs() -> None:
    assert ideal_rate(500, JITTER, 0.005, max_batch_size=10, seconds=20.0) == pytest.approx(2000.0, rel=0.02)


def test_without_any_cost_there_is_no_bound() -> None:
    assert ideal_rate(2, Constant(), 0.0) == math.inf


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("num_envs", {"num_envs": 0}), ("max_batch_size", {"max_batch_size": 0}), ("chunk_size", {"chunk_size": 0}),
        ("flat_s", {"flat_s": -1.0}), ("per_row_s", {"per_row_s": math.nan}), ("seconds", {"seconds": 0.0}),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(name: str, options: dict[str, Any]) -> None:
    defaults: dict[str, Any] = {"num_envs": 4, "step_time": JITTER, "flat_s": 0.005}
    with pytest.raises(ValueError, match=f"^{name}="):
        ideal_rate(**(defaults | options))
