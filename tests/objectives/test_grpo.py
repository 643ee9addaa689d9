"""GRPO: advantages against the group, worked out by hand, and what must not shift them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.table import LEVELS, A, B, H, TablePolicy, gradients, make_batch
from vla_async import keys
from vla_async.objectives import GRPO

NAN = float("nan")


def episodes(returns: Sequence[float], groups: Sequence[int], unfinished: Sequence[int] = (), most: int = 3) -> TensorDict:
    """One episode per row, of 1, 2, 3, 1, ... decisions of H = 2 env steps, the last of which ends after one env step."""
    N, T = len(returns), most
    td = TensorDict({}, batch_size=[N, T])
    td[keys.GROUP_ID] = torch.tensor(groups).reshape(N, 1, 1).expand(N, T, 1).clone()
    td[keys.EXECUTED] = torch.zeros(N, T, 2, dtype=torch.bool)
    td[keys.STEP_REWARDS] = torch.full((N, T, 2), NAN)  # whatever padding holds
    for name in (keys.DONE, keys.SUCCESS, keys.SUCCESS_ONCE):
        td[name] = torch.ones(N, T, 1, dtype=torch.bool)
    for row in range(N):
        length = row % T + 1
        td[keys.EXECUTED][row, :length] = torch.ones(length, 2, dtype=torch.bool)
        td[keys.EXECUTED][row, length - 1, 1] = False
        steps = 2 * length - 1
        td[keys.STEP_REWARDS][row][td[keys.EXECUTED][row]] = returns[row] / steps
        for name in (keys.DONE, keys.SUCCESS, keys.SUCCESS_ONCE):
            td[name][row, :length] = False
        td[keys.DONE][row, length - 1] = row not in unfinished
    return td


def advantages(td: TensorDict, **options: Any) -> list[float]:
    """The advantage of each row, after a look at its shape: the same at every trained decision, 0 elsewhere."""
    GRPO(**{"group_size": 4} | options).prepare(td)
    valid, mask = td[keys.EXECUTED].any(-1), td[keys.LOSS_MASK].squeeze(-1)
    assert not (mask & ~valid).any()
    assert not td[keys.ADVANTAGE].squeeze(-1)[~mask].any()
    for row, trained in zip(td[keys.ADVANTAGE].squeeze(-1), mask, strict=True):
        assert len(row[trained].unique()) <= 1
    return td[keys.ADVANTAGE][:, 0, 0].tolist()


def trained(td: TensorDict) -> list[bool]:
    return td[keys.LOSS_MASK].any(1).flatten().tolist()


def test_advantages_worked_out_by_hand_in_groups_that_arrive_mixed():
    """Members are found by id, not by their place; mean and deviation are those of the group."""
    td = episodes([1.0, 10.0, 3.0, 30.0, 8.0], [7, 5, 7, 5, 7])
    std_7, std_5 = math.sqrt((9 + 1 + 16) / 3), 10.0
    expected = [-3 / std_7, -10 / std_5, -1 / std_7, 10 / std_5, 4 / std_7]
    assert advantages(td) == pytest.approx(expected, rel=1e-5)
    assert trained(td) == [True] * 5


def test_without_the_deviation_they_are_centred_only():
    td = episodes([1.0, 10.0, 3.0, 30.0, 8.0], [7, 5, 7, 5, 7])
    assert advantages(td, normalize_std=False) == pytest.approx([-3, -10, -1, 10, 4], rel=1e-6)


def test_an_unfinished_or_masked_episode_shifts_no_baseline_and_is_not_trained_on():
    clean = episodes([1.0, 5.0, 6.0], [0, 0, 0])
    td = episodes([1.0, 5.0, 6.0, 1000.0, NAN, 1000.0], [0] * 6, unfinished=(3,))
    td[keys.LOSS_MASK] = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool).reshape(6, 1, 1).expand(6, 3, 1).clone()
    assert advantages(td, group_size=6) == pytest.approx([*advantages(clean), 0.0, 0.0, 0.0])
    assert trained(td) == [True, True, True, False, False, False]


def test_a_lost_member_can_be_a_row_of_padding():
    td = episodes([1.0, 5.0, 9.0], [0, 0, 0])
    td[keys.EXECUTED][1] = False
    assert advantages(td, normalize_std=False) == pytest.approx([-4, 0, 4])
    assert trained(td) == [True, False, True]


def test_a_group_of_equal_outcomes_is_left_out_and_counted():
    objective = GRPO(group_size=4, normalize_std=False)
    td = objective.prepare(episodes([0.1, 0.1, 0.1, 1.0, 3.0, 0.7], [0, 0, 0, 1, 1, 2], most=2))
    assert trained(td) == [False, False, False, True, True, False], "an episode alone has nothing to compare with"
    summary = objective.summarize({"grpo/loss": 1.0})
    outcome = (0.1 + 0.1 + 0.1 + 1.0 + 3.0 + 0.7) / 6
    expected = {"groups": 3, "equal_groups": 2, "unfinished_trajectories": 0, "outcome": pytest.approx(outcome)}
    assert summary == {"grpo/loss": 1.0} | {f"grpo/{name}": value for name, value in expected.items()}
    objective.end_update()
    assert objective.summarize({})["grpo/groups"] == 0, "each update counts its own"


def test_without_the_filter_equal_outcomes_count_with_an_advantage_of_exactly_zero():
    td = episodes([0.1, 0.1, 0.1], [0, 0, 0])
    assert advantages(td, filter_equal_groups=False) == [0.0, 0.0, 0.0]
    assert trained(td) == [True] * 3


def test_streamed_groups_get_what_they_get_together():
    whole = episodes([1.0, 2.0, 4.0, 3.0, 3.0, 9.0], [4, 4, 4, 1, 1, 1])
    parts = [part.clone() for part in whole.split(3)]
    together, apart = GRPO(group_size=3), GRPO(group_size=3)
    together.prepare(whole)
    for part in parts:
        apart.prepare(part)
    for key in (keys.ADVANTAGE, keys.LOSS_MASK):
        assert torch.equal(whole[key], torch.cat([part[key] for part in parts]))
    assert together.summarize({}) == apart.summarize({})


@pytest.mark.parametrize(
    ("outcome", "expected"), [("success_once", [0.5, 0.5, -0.5, -0.5]), ("success_at_end", [0.5, -0.5] * 2)]
)
def test_the_outcome_can_be_either_success(outcome, expected):
    td = episodes([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    td[keys.SUCCESS_ONCE][:2, 0] = True
    td[keys.SUCCESS][0, 0] = td[keys.SUCCESS][2, 2] = True  # where the episodes of 1 and of 3 decisions end
    td[keys.SUCCESS][1, 0] = True  # held before the end only
    assert advantages(td, outcome=outcome, normalize_std=False) == pytest.approx(expected)


def test_a_group_in_parts_or_too_large_is_refused():
    objective = GRPO(group_size=2)
    objective.prepare(episodes([1.0, 2.0], [3, 3]))
    with pytest.raises(ValueError, match=r"group 3 arrived in parts"):
        objective.prepare(episodes([1.0], [3]))
    objective.end_update()
    with pytest.raises(ValueError, match=r"group 3 has 3 trajectories, but objective.group_size=2"):
        objective.prepare(episodes([1.0, 2.0, 3.0], [3, 3, 3]))


def test_a_row_with_two_episodes_is_refused():
    td = episodes([1.0, 2.0, 3.0], [0, 0, 0])
    td[keys.DONE][2, 0] = True
    with pytest.raises(ValueError, match=r"one episode per row"):
        GRPO().prepare(td)


# ---------------------------------------------------------------- the loss


def masked_batch(policy: TablePolicy) -> TensorDict:
    batch = make_batch(policy, [[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    batch[keys.LOSS_MASK] = torch.tensor([[True], [True], [False], [True]])
    return batch


@pytest.mark.parametrize("level", LEVELS)
def test_for_an_unchanged_policy_the_loss_is_minus_the_advantages_that_count(level):
    policy = TablePolicy(has_critic=False)
    output = GRPO(level=level)(policy, masked_batch(policy))  # type: ignore[arg-type]
    number = {"token": [3 * A, A, 0, 2 * A], "action": [3, 1, 0, 2], "chunk": [1, 1, 0, 1]}[level]
    assert output.loss.item() == pytest.approx(-sum(n * a for n, a in zip(number, [1.0, -2.0, 0.5, 3.0], strict=True)))
    assert output.num_samples == sum(number)


def test_the_kl_to_the_reference_worked_out_by_hand():
    """k3 per action element, over what was executed and not masked; the reference comes from the batch."""
    policy = TablePolicy(drift=0.3)
    batch, objective = masked_batch(policy), GRPO(kl_coef=0.7)
    batch[keys.REFERENCE_LOG_PROB] = policy.behaviour + 0.1
    counts = (batch[keys.EXECUTED] & batch[keys.LOSS_MASK]).unsqueeze(-1).expand(B, H, A)
    batch[keys.REFERENCE_LOG_PROB][~counts] = NAN
    away = (policy.behaviour + 0.1 - policy.log_prob.detach())[counts]
    expected = (away.exp() - 1 - away).sum().item()
    loss, _, (gradient, *_) = gradients(objective, policy, [batch])
    plain, _, (plain_gradient, *_) = gradients(GRPO(), policy, [batch])
    assert loss - plain == pytest.approx(0.7 * expected, rel=1e-4)
    assert torch.equal((gradient != plain_gradient), counts), "and it reaches only those"
    torch.testing.assert_close((gradient - plain_gradient)[counts], 0.7 * (1 - away.exp()), rtol=1e-4, atol=1e-5)
    metrics = objective(policy, batch).metrics  # type: ignore[arg-type]
    assert metrics["grpo/reference_kl"][0].item() == pytest.approx(expected, rel=1e-5)


FIELDS: dict[str, Any] = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.01,
    "level": "action",
    "entropy_coef": 0.3,
    "target_kl": 1e-3,
    "correction": "decoupled",
    "importance_cap": 1.0,
    "outcome": "success_once",
    "normalize_std": False,
    "std_eps": 0.5,
    "filter_equal_groups": False,
    "kl_coef": 0.5,
}


def run_one_update(objective: GRPO) -> tuple[float, int, bool]:
    """Loss and valid count of one update on two fixed groups, one of which is equal; and whether it would end early."""
    policy = TablePolicy(drift=0.3)
    td = make_batch(policy, [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).unsqueeze(1)
    td[keys.STEP_REWARDS] = torch.tensor([1.0, 3.0, 0.0, 0.0]).reshape(B, 1, 1).expand(B, 1, H).clone()
    td[keys.GROUP_ID] = torch.tensor([0, 0, 1, 1]).reshape(B, 1, 1)
    td[keys.DONE] = td[keys.SUCCESS] = torch.ones(B, 1, 1, dtype=torch.bool)
    td[keys.SUCCESS_ONCE] = torch.tensor([1, 0, 0, 1], dtype=torch.bool).reshape(B, 1, 1)
    shift = torch.cos(torch.arange(1.0 * B * H * A)).reshape(B, 1, H, A)
    td[keys.PROXIMAL_LOG_PROB] = td[keys.LOG_PROB] + 0.2 * shift
    td[keys.REFERENCE_LOG_PROB] = td[keys.LOG_PROB] - 0.1
    output = objective(policy, objective.prepare(td).reshape(-1))  # type: ignore[arg-type]
    means = {name: float(total) / float(count) for name, (total, count) in output.metrics.items()}
    return output.loss.item(), output.num_samples, objective.ends_update(means)


def test_every_field_is_covered_by_a_test():
    """``group_size`` is a promise of the loop's, which its own test holds."""
    assert set(FIELDS) | {"group_size"} == {field.name for field in dataclasses.fields(GRPO) if field.init}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_has_an_effect(name):
    base: dict[str, Any] = {"level": "token"} | ({"correction": "decoupled"} if name == "importance_cap" else {})
    assert run_one_update(GRPO(**base)) == run_one_update(GRPO(**base)), "the comparison below needs a deterministic update"
    assert run_one_update(GRPO(**base)) != run_one_update(GRPO(**base | {name: FIELDS[name]}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, r"objective.group_size=1 must be at least 2"),
        ({"outcome": "reward"}, r"objective.outcome='reward' is unknown: choose return, success_once or success_at_end"),
        ({"std_eps": 0.0}, r"objective.std_eps=0.0 must be positive"),
        ({"kl_coef": -1.0}, r"objective.kl_coef=-1.0 must not be negative"),
        ({"correction": "vtrace"}, r"objective.correction='vtrace' .* choose none, truncated_is or decoupled"),
        ({"clip_low": 0.0}, r"objective.clip_low=0.0"),
    ],
)
def test_impossible_values_are_refused_on_construction(options, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**options)


def test_a_copy_shares_no_state():
    objective = GRPO(group_size=2)
    other = copy.deepcopy(objective)
    objective.prepare(episodes([1.0, 2.0], [0, 0]))
    assert (other.seen, other.counts) == (set(), {})
    assert GRPO.needs_whole_episodes
