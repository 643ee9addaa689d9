"""Size-weighted accumulation on two ranks: whatever each of them has, all of them step by the gradient of one batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.measures import CLIPS, SPLITS, STRATEGIES, measure
from tests.strategies.ranks import run_ranks


@pytest.fixture(scope="module", params=list(STRATEGIES))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    outcomes = run_ranks(2, measure, request.param, tmp_path_factory.mktemp("checkpoints"))
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcome
    return outcomes


CASES = [f"{name}, clip {clip}" for n, name in enumerate(SPLITS) for clip in (CLIPS if n < 7 else [list(CLIPS)[n % 3]])]


@pytest.mark.parametrize("case", CASES)
def test_ranks_step_by_the_gradient_of_one_batch(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        found = rank["splits"][case]
        assert found["gradient"] < 1e-6
        assert found["norm"] < 1e-6, "grad_norm and what clipping returns are of the mean gradient, over all ranks"
        assert found["parameters"] < 1e-6
        assert found["calls"] == 0.0, "a buffer is each rank's own"


def test_two_optimizers_may_take_turns(ranks: list[dict[str, Any]]) -> None:
    """A rank without a backward for the second must not bring its count of the first."""
    for rank in ranks:
        assert rank["turns"]["first"] < 1e-6
        assert rank["turns"]["second"] < 1e-6


def test_bf16_mixed_adds_up_in_float32(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["bf16"]["to the same micro-batches on one device"] < 1e-6
        assert 1e-4 < rank["bf16"]["to one batch in float32"] < 0.05, "autocast applies, and keeps what bfloat16 can"


def test_a_checkpoint_is_complete_and_fits_one_device_too(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["rest"]["saved"] == [0.0, 0.0]
        assert not rank["rest"]["sharded"]
        assert rank["rest"]["resumed against one device"] < 1e-6
        assert rank["rest"]["resumed against not interrupted"] < 1e-6


def test_fabric_sums_plain_numbers_exactly(ranks: list[dict[str, Any]]) -> None:
    """What the loops use for metrics and advantage statistics: float64 in one tensor."""
    assert [rank["rest"]["sums"] for rank in ranks] == [[2.0**41 + 3, 1.0]] * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no num_samples", "ValueError: fabric.backward got no num_samples"),
        ("nothing on any rank", "with no valid loss element"),
        ("raw backward on rank 0 alone", "never loss.backward() (on rank 0 of 2)"),
        ("zeroed on rank 1", "gradients were zeroed; call strategy.reset() with optimizer.zero_grad() (on rank 1 of 2)"),
        ("no zero_grad on rank 1", "call optimizer.zero_grad() after each step, and never loss.backward() (on rank 1 of 2)"),
        ("nan on rank 0", "FloatingPointError: the gradient is not finite (norm nan)"),
        ("backward after clipping", "a backward after the gradients were divided"),
        ("another optimizer", "all ranks must step the same optimizers in the same order"),
        ("another module", "has another module than rank"),
    ],
)
def test_all_ranks_refuse_together_what_is_wrong_on_one(ranks: list[dict[str, Any]], what: str, message: str) -> None:
    for rank in ranks:
        assert message in rank["refusals"][what]


def test_a_raw_backward_within_an_accumulation_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "in the middle of an accumulation" in ranks[1]["refusals"]["raw backward after a counted one"]


def test_a_gradient_that_is_not_finite_on_one_rank_reaches_no_weights(ranks: list[dict[str, Any]]) -> None:
    assert [rank["refusals"]["weights kept"] for rank in ranks] == ["True", "True"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("not the module", "must call fully_shard on the module itself too"),
        ("mp_policy", "must set no mp_policy; choose Fabric's precision instead"),
        ("another model's optimizer", "parameters of no module that was set up"),
        ("an optimizer that has stepped", "has a state already: load it after fabric.setup"),
    ],
)
def test_what_fsdp_refuses_at_set_up(ranks: list[dict[str, Any]], what: str, message: str) -> None:
    for rank in ranks:
        if rank["set-up"]:
            assert message in rank["set-up"][what]


def test_fsdp_refuses_a_forward_on_shards(ranks: list[dict[str, Any]]) -> None:
    """Between clipping and the step a forward would have to wait for the other ranks."""
    for rank in ranks:
        is_sharded = bool(rank["set-up"])
        assert ("the weights are sharded" in rank["refusals"]["forward after clipping"]) == is_sharded
