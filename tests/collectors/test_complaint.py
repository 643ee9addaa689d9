"""A NaN is never what a policy means; an infinity is, unless a trainer would compute with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from tests.collectors.rollout_fakes import CounterEnv, Troubled, collecting, take
from vla_async import keys
from vla_async.collectors.board import Board
from vla_async.collectors.complaint import Complaint
from vla_async.collectors.slab import Key, Leaf, Slab, SlabLayout

INF, NAN = float("inf"), float("nan")
ROWS = np.array([0, 3, 6])


def make_complaint() -> Complaint:
    seen = Leaf(("observation",), (2,), torch.float32, "observation")
    done = [Leaf((name,), (1,), torch.bool, "outcome") for name in ("done", "terminated", "truncated")]
    slab, board = Slab(SlabLayout((seen, *done), 3, 2, spans_episodes=False)), Board(3, 3, 1)
    board.slot[:] = [2, 0, 1]
    return Complaint(slab, board, [seen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key", [("logits",), ("collector", "action_logits"), ("vla_action", "mask_bias")])
def test_an_infinity_is_fine_where_no_trainer_computes_with_it(key: Key, dtype: torch.dtype) -> None:
    made = {key: torch.tensor([[0.0, -INF], [INF, 1.0], [-INF, INF]], dtype=dtype)}
    make_complaint().check_finite(made, ROWS, 0)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize(
    "key",
    [keys.CHUNK, (keys.LOG_PROB,), (keys.VALUE,), ("action",), ("agents", "action"), ("sample_log_prob",)],
)
def test_an_action_its_log_prob_and_a_value_are_finite(key: Key, value: float) -> None:
    made = {key: torch.tensor([[0.0, 1.0], [value, 1.0], [2.0, 3.0]])}
    with pytest.raises(FloatingPointError, match=rf"{key[-1]} is not finite; it was for env \[0\]"):
        make_complaint().check_finite(made, np.array([0, 6, 3]), 0)


def test_a_nan_is_found_beside_infinities_and_its_env_alone_is_named() -> None:
    made = {("logits",): torch.tensor([[-INF, 0.0], [-INF, NAN], [INF, 0.0]])}
    with pytest.raises(FloatingPointError, match=r"logits is not finite; it was for env \[0\]"):
        make_complaint().check_finite(made, np.array([0, 6, 3]), 0)


def test_a_number_that_is_no_float_is_no_concern() -> None:
    make_complaint().check_finite({("action",): torch.tensor([[1], [2], [3]])}, ROWS, 0)


class Masks(Troubled):
    """Writes masked logits beside its action."""

    def __init__(self) -> None:
        super().__init__()
        self.out_keys = [*self.out_keys, "logits"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        td = super().forward(tensordict)
        return td.set("logits", torch.tensor([0.0, -INF]).expand(*td.batch_size, 2).clone())


def test_masked_logits_that_a_policy_stores_reach_the_batch() -> None:
    with collecting([CounterEnv], Masks(), frames_per_batch=4, total_frames=8) as collector:
        [batch, _] = take(collector, 2)
    assert torch.equal(batch["logits"][..., 1], torch.full_like(batch["logits"][..., 1], -INF))
