"""Three policies: behaviour, proximal, current. What each correction makes of them, and who provides the proximal one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.table import LEVELS, RAGGED, VALID, A, B, H, TablePolicy, gradients, make_batch
from vla_async import keys
from vla_async.objectives import GRPO, PPO, Objective

CORRECTED = ("truncated_is", "decoupled", "vtrace")


def stale_batch(policy: TablePolicy, scale: float = 0.4) -> TensorDict:
    """Decisions whose proximal policy is neither the behaviour nor the current one."""
    batch = make_batch(policy, RAGGED)
    noise = torch.randn(B, H, A, generator=torch.Generator().manual_seed(7))
    batch[keys.PROXIMAL_LOG_PROB] = batch[keys.LOG_PROB] + scale * noise
    return batch


def surrogate(log_ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize("correction", ["none", *CORRECTED])
def test_the_loss_worked_out_by_hand(correction):
    """The clip's centre and the weight, at chunk level: w is 1.5 (kept), 4 (capped at 2) and 0.5."""
    policy, batch = TablePolicy(), make_batch(TablePolicy(), RAGGED)
    ages, moves = {0: math.log(1.5), 1: math.log(4.0), 3: math.log(0.5)}, {0: 0.1, 1: -0.3, 3: 0.25}
    number = {0: 6, 1: 2, 3: 4}  # executed elements
    age, moved = torch.full((B, H, A), 9.0), torch.full((B, H, A), -9.0)
    for row in number:
        executed = batch[keys.EXECUTED][row]
        age[row][executed], moved[row][executed] = ages[row] / number[row], moves[row] / number[row]
    batch[keys.PROXIMAL_LOG_PROB] = policy.behaviour + age
    policy.log_prob = (policy.behaviour + age + moved).requires_grad_()
    output = PPO(correction=correction, value_coef=0.0)(policy, batch)  # type: ignore[arg-type]
    expected = 0.0
    for row, advantage in ((0, 1.0), (1, -2.0), (3, 3.0)):
        capped = min(ages[row], math.log(2.0))
        if correction == "none":
            expected += surrogate(ages[row] + moves[row], advantage)
        elif correction == "truncated_is":
            expected += surrogate(capped + moves[row], advantage)
        else:
            expected += math.exp(capped) * surrogate(moves[row], advantage)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    assert output.metrics["ppo/log_prob_gap"][0].item() == pytest.approx(sum(map(abs, ages.values())), rel=1e-5)
    if correction != "none":
        assert output.metrics["ppo/importance_weight"][0].item() == pytest.approx(1.5 + 2.0 + 0.5, rel=1e-5)
        assert output.metrics["ppo/capped_fraction"][0].item() == 1


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_weights_without_a_reachable_cap_are_plain_ppo(level):
    policy = TablePolicy(drift=0.3)
    plain = gradients(PPO(level=level), policy, [stale_batch(policy)])
    truncated = gradients(PPO(level=level, correction="truncated_is", importance_cap=1e9), policy, [stale_batch(policy)])
    assert truncated[0] == pytest.approx(plain[0], rel=1e-5)
    for a, b in zip(plain[2], truncated[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_decoupled_clips_around_the_proximal_policy():
    """Stale decisions that plain PPO would clip away keep their gradient, and the clip still holds the current policy."""
    policy, batch = TablePolicy(), make_batch(TablePolicy())
    batch[keys.ADVANTAGE] = torch.ones(B, 1)
    policy.log_prob = (policy.behaviour + 0.1).requires_grad_()  # a ratio of exp(0.6) per chunk
    batch[keys.PROXIMAL_LOG_PROB] = policy.log_prob.detach().clone()
    for correction, clipped in (("none", B), ("decoupled", 0)):
        output = PPO(correction=correction)(policy, batch)  # type: ignore[arg-type]
        assert output.metrics["ppo/clip_fraction"][0].item() == clipped
    policy.log_prob = (policy.behaviour + 0.2).requires_grad_()
    assert PPO(correction="decoupled")(policy, batch).metrics["ppo/clip_fraction"][0].item() == B  # type: ignore[arg-type]


def objectives(level: str) -> list[Objective]:
    ppo: list[Objective] = [PPO(level=level, correction=name, entropy_coef=0.1, value_clip=0.5) for name in CORRECTED]
    return [*ppo, *(GRPO(level=level, correction=name, entropy_coef=0.1) for name in ("none", "truncated_is", "decoupled"))]


def with_mask(batch: TensorDict) -> TensorDict:
    batch[keys.LOSS_MASK] = torch.ones(B, 1, dtype=torch.bool)
    return batch


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_not_executed_does_not_matter_even_if_it_is_nan(level):
    policy = TablePolicy(drift=0.3)
    for objective in objectives(level):
        clean, dirty = with_mask(stale_batch(policy)), with_mask(stale_batch(policy))
        idle = ~dirty[keys.EXECUTED]
        for key in (keys.LOG_PROB, keys.PROXIMAL_LOG_PROB):
            dirty[key][idle] = float("nan")
        for key in (keys.ADVANTAGE, keys.VALUE, keys.VALUE_TARGET):
            dirty[key][idle.all(-1)] = float("nan")
        first, second = gradients(objective, policy, [clean]), gradients(objective, policy, [dirty])
        assert first[:2] == second[:2], objective
        assert all(map(torch.equal, first[2], second[2])), objective
        metrics = objective(policy, dirty).metrics  # type: ignore[arg-type]
        assert all(math.isfinite(float(total)) for total, _ in metrics.values()), objective


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [2, 2]])
def test_any_split_sums_to_the_same_loss_count_gradient_and_metrics(level, sizes):
    policy = TablePolicy(drift=0.3)
    for objective in objectives(level):
        batch = with_mask(stale_batch(policy))
        parts = list(batch.split(sizes))
        whole, split = gradients(objective, policy, [batch]), gradients(objective, policy, parts)
        assert split[0] == pytest.approx(whole[0], rel=1e-5), objective
        assert split[1] == whole[1] == VALID[level]
        for a, b in zip(whole[2], split[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        outputs = [objective(policy, part).metrics for part in parts]  # type: ignore[arg-type]
        for name, (total, count) in objective(policy, batch).metrics.items():  # type: ignore[arg-type]
            assert sum(float(m[name][0]) for m in outputs) == pytest.approx(float(total), rel=1e-5, abs=1e-5), name
            assert sum(float(m[name][1]) for m in outputs) == float(count), name


# ---------------------------------------------------------------- who provides the proximal policy


@pytest.mark.parametrize("correction", ["truncated_is", "decoupled"])
def test_before_the_first_step_the_proximal_log_prob_is_the_current_one_and_kept(correction):
    policy, batch = TablePolicy(drift=0.3), make_batch(TablePolicy(), RAGGED)
    output = PPO(correction=correction)(policy, batch)  # type: ignore[arg-type]
    kept = output.kept[keys.PROXIMAL_LOG_PROB]
    assert torch.equal(kept, policy.log_prob)
    assert not kept.requires_grad, "the proximal policy is a constant"
    assert keys.PROXIMAL_LOG_PROB not in batch.keys(), "the caller's batch is left alone"
    gap = output.metrics["ppo/log_prob_gap"]
    expected = ((policy.log_prob - policy.behaviour) * batch[keys.EXECUTED].unsqueeze(-1)).sum((1, 2)).abs().sum()
    assert (gap[0].item(), gap[1]) == (pytest.approx(expected.item(), rel=1e-5), VALID["chunk"])


@pytest.mark.parametrize("correction", ["truncated_is", "decoupled"])
def test_keeping_it_and_recomputing_it_are_the_same_in_later_steps(correction):
    policy = TablePolicy(drift=0.3)
    keeping, recomputing = make_batch(policy, RAGGED), make_batch(policy, RAGGED)
    objective = PPO(correction=correction)
    objective.recompute(policy, recomputing, micro_batch_size=3)  # type: ignore[arg-type]
    keeping.update(dict(objective(policy, keeping).kept))  # type: ignore[arg-type]
    objective.ends_update({"ppo/approx_kl": 0.0})
    policy.log_prob = (policy.log_prob.detach() + 0.05).requires_grad_()  # the optimizer step
    first, second = gradients(objective, policy, [keeping]), gradients(objective, policy, [recomputing])
    assert first[0] == second[0]
    assert all(map(torch.equal, first[2], second[2]))
    assert not torch.equal(recomputing[keys.PROXIMAL_LOG_PROB], policy.log_prob), "the current policy has moved on"


def test_forgetting_it_is_an_error_after_the_first_step_until_the_update_ends():
    policy, objective = TablePolicy(), PPO(correction="decoupled")
    objective(policy, make_batch(policy))  # type: ignore[arg-type]
    objective.ends_update({"ppo/approx_kl": 0.0})
    with pytest.raises(RuntimeError, match=r"correction='decoupled' needs 'proximal_log_prob' after an update's first"):
        objective(policy, make_batch(policy))  # type: ignore[arg-type]
    objective.end_update()
    assert objective(policy, make_batch(policy)).num_samples == B  # type: ignore[arg-type]


def test_without_a_correction_the_gap_is_reported_while_it_is_known():
    policy, objective = TablePolicy(drift=0.3), PPO()
    assert objective(policy, make_batch(policy)).metrics["ppo/log_prob_gap"][1] == B  # type: ignore[arg-type]
    objective.ends_update({"ppo/approx_kl": 0.0})
    output = objective(policy, make_batch(policy))  # type: ignore[arg-type]
    assert output.metrics["ppo/log_prob_gap"][1] == 0, "the proximal policy is gone"
    assert not output.kept


def test_recompute_fills_trajectories_without_gradient():
    policy, batch = TablePolicy(drift=0.3), make_batch(TablePolicy()).reshape(2, 2)
    PPO().recompute(policy, batch)  # type: ignore[arg-type]
    log_prob = batch[keys.PROXIMAL_LOG_PROB]
    assert torch.equal(log_prob.reshape(B, H, A), policy.log_prob)
    assert not log_prob.requires_grad


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({}, "never"),
        ({"correction": "truncated_is"}, "later_steps"),
        ({"correction": "decoupled"}, "later_steps"),
        ({"correction": "vtrace"}, "prepare"),
    ],
)
def test_an_objective_says_where_it_needs_the_proximal_policy(options: dict[str, Any], need):
    assert PPO(**options).needs_proximal == need
