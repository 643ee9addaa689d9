"""PPO, the tiny policy and size-weighted accumulation together: what must hold to float precision."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.numerics.learner import A, H, Learner, N, T, make_policy, make_rollout
from vla_async import keys


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, N * T - 1), max_size=8),
    level=st.sampled_from(["token", "action", "chunk"]),
    head=st.sampled_from(["gaussian", "tokens"]),
)
def test_any_split_into_micro_batches_gives_the_gradient_of_one_batch(cuts, level, head):
    options: dict[str, Any] = {"level": level, "entropy_coef": 0.01, "value_clip": 0.2, "gamma_per": "env_step"}
    policy = make_policy(head, **options)
    batch = policy.objective.prepare(make_rollout(policy)).reshape(-1)
    batch = batch[torch.randperm(N * T, generator=torch.Generator().manual_seed(len(cuts)))]
    edges = [0, *sorted(cuts), N * T]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    whole = Learner(copy.deepcopy(policy)).step([batch])
    split = Learner(copy.deepcopy(policy)).step(list(batch.split(sizes)))
    assert whole.abs().max() > 1e-3
    assert ((split - whole).abs().max() / whole.abs().max()).item() < 1e-6


@pytest.mark.parametrize("head", ["gaussian", "tokens"])
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_with_a_learning_rate_of_zero_the_ratio_stays_one(head, level):
    policy = make_policy(head, lr=0.0, level=level)
    learner, batch = Learner(policy), policy.objective.prepare(make_rollout(policy)).reshape(-1)
    for _ in range(3):
        learner.step(list(batch.split(7)))
        metrics = policy.training_step(batch).metrics
        assert metrics["ppo/log_ratio"][0].item() / metrics["ppo/log_ratio"][1] < 1e-6
        assert metrics["ppo/clip_fraction"][0].item() == 0
        assert metrics["ppo/approx_kl"][0].item() == pytest.approx(0.0, abs=1e-9)


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    policy = make_policy(level="chunk", value_coef=0.0)
    batch = policy.objective.prepare(make_rollout(policy)).reshape(-1)
    learner = Learner(copy.deepcopy(policy))
    executed = batch[keys.EXECUTED].unsqueeze(-1)
    log_prob = (policy.evaluate(batch)[keys.LOG_PROB] * executed).sum((1, 2))
    loss = -(log_prob * batch[keys.ADVANTAGE].squeeze(-1)).mean()
    parameters = list(policy.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    expected = torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(learner.step([batch]), expected, rtol=1e-5, atol=1e-6)


def test_the_critic_warm_up_leaves_the_actor_bit_for_bit_even_with_weight_decay():
    policy = make_policy(weight_decay=0.1, critic_warmup_updates=2, entropy_coef=0.1)
    learner, before = Learner(policy), copy.deepcopy(policy.state_dict())
    for update in range(3):
        batch = policy.objective.prepare(make_rollout(policy, seed=update)).reshape(-1)
        learner.step([batch])
        policy.objective.end_update()
        moved = {
            name.split("_")[0].split(".")[0] for name, x in policy.state_dict().items() if not torch.equal(x, before[name])
        }
        assert moved == ({"critic"} if update < 2 else {"critic", "actor", "head"})


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("head", ["gaussian", "tokens"])
def test_ppo_solves_a_bandit_in_which_only_the_executed_part_of_a_chunk_is_paid(head, level):
    """A sign error anywhere between the reward and the optimizer would make it worse instead."""
    policy = make_policy(head, lr=1e-2, level=level, gamma=0.9)
    learner, errors = Learner(policy), []
    for update in range(30):
        td = TensorDict({}, batch_size=[64, 1])
        td[keys.STATE] = torch.rand(64, 1, 4, generator=torch.Generator().manual_seed(update)) - 0.5
        td[keys.INSTRUCTION_TOKENS] = policy.tokenize("go").expand(64, 1, -1).clone()
        td[keys.REQUEST_KEY] = torch.arange(64).reshape(64, 1, 1) + 64 * update
        policy.act(td)
        error = (td[keys.CHUNK] - td[keys.STATE][..., None, :A]).pow(2).sum(-1)
        td[keys.EXECUTED] = torch.tensor([True, True, False]).expand(64, 1, H).clone()
        td[keys.STEP_REWARDS] = -error  # the last one is never executed, so it must not count
        td[keys.DONE] = td[keys.TERMINATED] = torch.ones(64, 1, 1, dtype=torch.bool)
        td[keys.NEXT_VALUE] = torch.full((64, 1, 1), float("nan"))
        batch = policy.objective.prepare(td).reshape(-1)
        for _ in range(4):
            learner.step(list(batch.split(32)))
        policy.objective.end_update()
        errors.append(error.mean((0, 1)))
    first, last = torch.stack(errors[:3]).mean(0), torch.stack(errors[-3:]).mean(0)
    assert (last[:2] < 0.6 * first[:2]).all(), (first, last)
    if head == "tokens":  # the Gaussian's deviation is shared by the chunk, so there the idle step improves as well
        assert last[2] > 0.8 * first[2], "what is not executed must not be trained"
