"""PPO's loss on a policy whose every log-prob is a free parameter, so that each gradient can be told by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.table import LEVELS, RAGGED, VALID, A, B, H, TablePolicy, gradients, make_batch
from vla_async import keys
from vla_async.objectives import GRPO, PPO


@pytest.mark.parametrize("level", LEVELS)
def test_for_an_unchanged_policy_the_ratio_is_one_and_the_loss_minus_the_advantages(level):
    policy = TablePolicy()
    output = PPO(level=level, value_coef=0.0)(policy, make_batch(policy, RAGGED))
    per_element = {"token": [3 * A, A, 0, 2 * A], "action": [3, 1, 0, 2], "chunk": [1, 1, 0, 1]}[level]
    expected = -sum(n * a for n, a in zip(per_element, [1.0, -2.0, 0.5, 3.0], strict=True))
    assert output.loss.item() == pytest.approx(expected)
    assert output.num_samples == VALID[level]
    for name in ("approx_kl", "clip_fraction", "log_ratio"):
        assert output.metrics[f"ppo/{name}"][0].item() == 0.0


def test_the_loss_worked_out_by_hand_at_chunk_level():
    policy = TablePolicy()
    batch = make_batch(policy, RAGGED)
    shift = torch.zeros(B, H, A)
    shift[0] = 0.1 / 6  # the six elements sum to a log-ratio of 0.1
    shift[1, 0] = 0.25 / 2  # only the first action was executed: 0.25
    shift[1, 1:] = 9.0  # never executed
    shift[3, :2] = 0.5 / 4  # 0.5, beyond the clip
    policy.log_prob = (policy.behaviour + shift).requires_grad_()
    output = PPO(level="chunk", clip_low=0.1, clip_high=0.3, value_coef=0.4, entropy_coef=0.01)(policy, batch)
    policy_loss = -math.exp(0.1) * 1.0 + math.exp(0.25) * 2.0 - 1.3 * 3.0
    values = policy.value.flatten().tolist()
    value_loss = 0.5 * ((values[0] - 2) ** 2 + (values[1] + 1) ** 2 + (values[3] - 4) ** 2)
    entropy = (policy.entropy[0].sum() + policy.entropy[1, 0].sum() + policy.entropy[3, :2].sum()).item()
    assert output.loss.item() == pytest.approx(policy_loss + 0.4 * value_loss - 0.01 * entropy, rel=1e-5)
    assert output.metrics["ppo/clip_fraction"][0].item() == 1


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_not_executed_does_not_matter_even_if_it_is_nan(level):
    policy, objective = TablePolicy(drift=0.3), PPO(level=level, entropy_coef=0.1, value_clip=0.5)
    clean, dirty = make_batch(policy, RAGGED), make_batch(policy, RAGGED)
    idle = ~dirty[keys.EXECUTED]
    dirty[keys.LOG_PROB][idle] = float("nan")
    padding = idle.all(-1)
    for key in (keys.ADVANTAGE, keys.VALUE, keys.VALUE_TARGET):
        dirty[key][padding] = float("nan")
    assert padding.any()
    first, second = gradients(objective, policy, [clean]), gradients(objective, policy, [dirty])
    assert first[:2] == second[:2]
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.equal(a, b)
    metrics = objective(policy, dirty).metrics
    assert all(math.isfinite(float(total)) and math.isfinite(float(count)) for total, count in metrics.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [1, 3], [2, 2]])
def test_any_split_of_a_batch_sums_to_the_same_loss_count_gradient_and_metrics(level, sizes):
    policy, objective = TablePolicy(drift=0.3), PPO(level=level, entropy_coef=0.1, value_clip=0.5)
    batch = make_batch(policy, RAGGED)
    parts = list(batch.split(sizes))
    whole, split = gradients(objective, policy, [batch]), gradients(objective, policy, parts)
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    assert split[1] == whole[1] == VALID[level]
    for a, b in zip(whole[2], split[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    outputs = [objective(policy, part).metrics for part in parts]
    for name, (total, count) in objective(policy, batch).metrics.items():
        assert sum(float(m[name][0]) for m in outputs) == pytest.approx(float(total), rel=1e-5, abs=1e-6), name
        assert sum(float(m[name][1]) for m in outputs) == float(count), name


def test_a_value_loss_counts_once_per_valid_element_of_its_decision():
    weights = {"token": [3 * A, A, 0, 2 * A], "action": [3, 1, 0, 2], "chunk": [1, 1, 0, 1]}
    for level, weight in weights.items():
        policy = TablePolicy()
        _, _, (_, _, gradient) = gradients(PPO(level=level, value_coef=1.0), policy, [make_batch(policy, RAGGED)])
        error = policy.value.detach() - make_batch(policy)[keys.VALUE_TARGET]
        torch.testing.assert_close(gradient, error * torch.tensor(weight).unsqueeze(-1))


FIELDS: dict[str, Any] = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "gamma": 0.5,
    "gamma_per": "env_step",
    "gae_lambda": 0.1,
    "level": "token",
    "value_coef": 2.0,
    "entropy_coef": 0.3,
    "value_clip": 0.1,
    "huber_delta": 0.5,
    "normalize_advantages": False,
    "target_kl": 1e-3,
    "critic_warmup_updates": 9,
    "dual_clip": 1.01,
    "correction": "decoupled",
    "importance_cap": 1.0,
    "trace_cap": 0.1,
}
# what a field needs around it to have an effect
BASE: dict[str, Any] = {
    "dual_clip": {"level": "token"},
    "importance_cap": {"correction": "decoupled"},
    "trace_cap": {"correction": "vtrace"},
}


def run_one_update(objective: PPO) -> tuple[float, bool]:
    """Loss of the second update on fixed trajectories, and whether it would end early."""
    for seed in (0, 1):
        policy = TablePolicy(seed=seed, drift=0.3)
        td = make_batch(policy, [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).unsqueeze(0)
        td[keys.STEP_REWARDS] = (torch.arange(B * H) - 6.0).reshape(1, B, H) * (seed + 1.0)
        td[keys.NEXT_VALUE] = td[keys.VALUE] + 0.5
        td[keys.TERMINATED] = torch.tensor([[[False], [False], [True], [False]]])
        td[keys.DONE] = td[keys.TERMINATED].clone()
        td[keys.PROXIMAL_LOG_PROB] = td[keys.LOG_PROB] + 0.2 * torch.cos(torch.arange(1.0 * B * H * A)).reshape(1, B, H, A)
        batch = objective.prepare(td).reshape(-1)
        policy.value = (batch[keys.VALUE] + batch[keys.VALUE_TARGET]) / 2
        output = objective(policy, batch)
        objective.end_update()
    means = {name: float(total) / float(count) for name, (total, count) in output.metrics.items()}
    return output.loss.item(), objective.ends_update(means)


def test_every_field_is_covered_by_the_effect_test():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(PPO) if field.init}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_has_an_effect(name):
    base = BASE.get(name, {})
    assert run_one_update(PPO(**base)) == run_one_update(PPO(**base)), "the comparison below needs a deterministic update"
    assert run_one_update(PPO(**base)) != run_one_update(PPO(**base | {name: FIELDS[name]}))


def test_the_critic_warm_up_touches_no_actor_parameter_and_ends():
    policy, objective = TablePolicy(drift=0.3), PPO(critic_warmup_updates=2, entropy_coef=0.1)
    batch = make_batch(policy)
    for update in range(3):
        actor = [policy.log_prob, policy.entropy]
        grads = torch.autograd.grad(objective(policy, batch).loss, [*actor, policy.value], allow_unused=True)
        # None, not zero: an optimizer moves a parameter with a zero gradient (momentum, weight decay)
        assert [g is None for g in grads] == ([True, True, False] if update < 2 else [False, False, False])
        objective.end_update()


def test_what_an_untrained_critic_has_valued_does_not_move_the_policy_however_late_it_comes():
    """Old data carries the values of an old critic, so the warm-up lasts as much longer as the data is old."""
    policy, objective = TablePolicy(drift=0.3), PPO(critic_warmup_updates=2, entropy_coef=0.1)
    batch = make_batch(policy)
    staleness = torch.arange(len(batch)).unsqueeze(-1) % 2 * 2  # 0, 2, 0, 2, ...
    batch[keys.STALENESS] = staleness
    objective.updates = 3
    half = torch.autograd.grad(objective(policy, batch).loss, policy.log_prob)[0]
    fresh = batch.clone()
    fresh[keys.ADVANTAGE] = torch.where(staleness == 0, batch[keys.ADVANTAGE], 0.0)
    fresh[keys.STALENESS] = torch.zeros_like(staleness)
    torch.testing.assert_close(half, torch.autograd.grad(objective(policy, fresh).loss, policy.log_prob)[0])
    assert objective(policy, batch).num_samples == objective(policy, fresh).num_samples, "the critic learns from all of it"
    objective.updates = 4
    whole = torch.autograd.grad(objective(policy, batch).loss, policy.log_prob)[0]
    assert not torch.equal(whole, half)


def test_a_resumed_objective_continues_its_warm_up_and_its_statistics():
    objective, resumed = PPO(critic_warmup_updates=3), PPO(critic_warmup_updates=3)
    run_one_update(objective)
    resumed.load_state_dict(objective.state_dict())
    assert resumed.updates == 2
    assert resumed.warming_up
    assert run_one_update(resumed) == run_one_update(objective)
    assert not resumed.warming_up


def test_two_objectives_share_no_state():
    first, second = PPO(), PPO()
    first.end_update()
    first.normalizer.mean = 5.0
    assert (second.updates, second.normalizer.mean) == (0, 0.0)


def test_advantages_are_normalised_by_the_previous_update_not_by_their_own():
    """Preparing trajectories one by one gives what preparing them together gives: streaming is the same algorithm."""

    def rollout() -> TensorDict:
        td = TensorDict({}, batch_size=[3, 2])
        generator = torch.Generator().manual_seed(0)
        td[keys.STEP_REWARDS] = torch.randn(3, 2, H, generator=generator)
        td[keys.VALUE], td[keys.NEXT_VALUE] = torch.randn(2, 3, 2, 1, generator=generator)
        td[keys.EXECUTED] = torch.rand(3, 2, H, generator=generator) < 0.7
        td[keys.DONE] = td[keys.TERMINATED] = torch.zeros(3, 2, 1, dtype=torch.bool)
        return td

    together, one_by_one = PPO(), PPO()
    for _ in range(2):
        whole, parts = together.prepare(rollout()), [one_by_one.prepare(part) for part in rollout().split(1)]
        together.end_update()
        one_by_one.end_update()
        torch.testing.assert_close(whole[keys.ADVANTAGE], torch.cat([part[keys.ADVANTAGE] for part in parts]))
    assert one_by_one.normalizer.std == pytest.approx(together.normalizer.std)
    assert together.normalizer.std != 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_advantage_statistics_weigh_a_decision_as_the_loss_does(level):
    objective, td = PPO(level=level, gae_lambda=0.0), make_batch(TablePolicy(), RAGGED).unsqueeze(0)
    td[keys.STEP_REWARDS], td[keys.NEXT_VALUE] = torch.randn(1, B, H), torch.randn(1, B, 1)
    td[keys.DONE] = td[keys.TERMINATED] = torch.zeros(1, B, 1, dtype=torch.bool)
    raw = objective.prepare(td)[keys.ADVANTAGE].flatten().double()  # the first update leaves them as they are
    objective.end_update()
    weight = torch.tensor([1, 1, 0, 1] if level == "chunk" else [3, 1, 0, 2])
    assert objective.normalizer.mean == pytest.approx((raw * weight).sum().item() / weight.sum().item())


def test_the_summary_holds_the_explained_variance_instead_of_its_moments():
    policy = TablePolicy()
    objective, batch = PPO(level="action"), make_batch(policy, RAGGED)
    means = {k: float(total) / float(count) for k, (total, count) in objective(policy, batch).metrics.items()}
    summary = objective.summarize(means)
    weight = torch.tensor([3, 1, 0, 2])
    target = batch[keys.VALUE_TARGET].flatten().repeat_interleave(weight)
    error = target - batch[keys.VALUE].flatten().repeat_interleave(weight)
    expected = 1 - error.var(correction=0) / target.var(correction=0)
    assert summary["ppo/explained_variance"] == pytest.approx(expected.item(), rel=1e-5)
    assert not any("squared" in name for name in summary)
    assert set(means) - set(summary) == {"ppo/error", "ppo/squared_error", "ppo/squared_value_target"}


def test_a_policy_without_a_critic_is_refused():
    policy = TablePolicy(has_critic=False)
    with pytest.raises(ValueError, match="PPO needs a critic, but TablePolicy"):
        PPO()(policy, make_batch(policy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, r"objective.clip_low=1.5 must be between 0 and 1"),
        ({"clip_high": 0.0}, r"objective.clip_high=0.0 must be positive"),
        ({"gamma": 1.1}, r"objective.gamma=1.1 must be in \[0, 1\]"),
        ({"gamma_per": "step"}, r"objective.gamma_per='step' is unknown: choose decision or env_step"),
        ({"gae_lambda": -0.1}, r"objective.gae_lambda=-0.1"),
        ({"level": "chunks"}, r"objective.level='chunks' is unknown: choose token, action or chunk"),
        ({"value_coef": -1.0}, r"objective.value_coef=-1.0"),
        ({"entropy_coef": -1.0}, r"objective.entropy_coef=-1.0"),
        ({"value_clip": 0.0}, r"objective.value_clip=0.0 must be positive, or null"),
        ({"huber_delta": -1.0}, r"objective.huber_delta=-1.0 must be positive, or null"),
        ({"target_kl": 0.0}, r"objective.target_kl=0.0 must be positive, or null"),
        ({"dual_clip": 1.0}, r"objective.dual_clip=1.0 must be above 1"),
        ({"correction": "tis"}, r"objective.correction='tis' .* choose none, truncated_is, decoupled or vtrace"),
        ({"importance_cap": 0.5}, r"objective.importance_cap=0.5 must be at least 1"),
        ({"trace_cap": 3.0}, r"objective.trace_cap=3.0 must be positive and at most objective.importance_cap=2.0"),
        ({"critic_warmup_updates": -1}, r"objective.critic_warmup_updates=-1"),
        ({"critic_warmup_updates": 1, "value_coef": 0.0}, r"critic_warmup_updates=1 would train nothing"),
    ],
)
def test_impossible_values_are_refused_on_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PPO(**options)


@pytest.mark.parametrize("objective", [PPO(gamma=0.8, correction="decoupled"), GRPO(group_size=4, dual_clip=3.0)])
def test_a_config_file_can_name_it_by_class_path(objective):
    from jsonargparse import ArgumentParser

    from vla_async.policies import TinyVLAPolicy

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TinyVLAPolicy, "model")
    model: dict[str, Any] = {"class_path": "vla_async.policies.TinyVLAPolicy"}
    init_args = {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective) if field.init}
    name = f"vla_async.objectives.{type(objective).__name__}"
    model["init_args"] = {"objective": {"class_path": name, "init_args": init_args}}
    config = parser.parse_object({"model": model})
    assert parser.instantiate(config).model.objective == objective
