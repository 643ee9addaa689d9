"""Every VLA policy trains on two ranks as on one device, whatever it freezes, recomputes or keeps in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.rank_measures import CASES, STRATEGIES, measure
from tests.strategies.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> Any:
    outcomes = run_ranks(2, measure, limit=240.0)
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcome
    return outcomes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_a_policy_as_one_device(ranks: list[dict[str, Any]], case: str, strategy: str) -> None:
    """The second step is from the weights that the first one left on all ranks."""
    for rank in ranks:
        for step in ("first", "second"):
            found = rank[f"{case}, {strategy}"][step]
            assert found["gradients"] < 1e-5
            assert found["weights"] < 1e-5
    assert ranks[0][f"{case}, {strategy}"]["kept"] == 1.0, "rank 0 measures memory alone, while the others wait"
