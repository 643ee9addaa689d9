"""GRPO and its reference policy on a real policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.numerics.learner import Learner, make_policy
from vla_async import keys
from vla_async.objectives import GRPO
from vla_async.objectives.reference import Reference
from vla_async.policies import TinyVLAPolicy

GROUPS, SIZE = 8, 8


def make_groups(policy: TinyVLAPolicy, update: int = 0, T: int = 2) -> TensorDict:  # noqa: N803
    """Groups that start in the same state; each decision is paid for its nearness to a target, in what is executed."""
    td = TensorDict({}, batch_size=[GROUPS * SIZE, T])
    start = torch.rand(GROUPS, 1, 4, generator=torch.Generator().manual_seed(update)) - 0.5
    td[keys.STATE] = start.repeat_interleave(SIZE, 0).expand(-1, T, -1).clone()
    td[keys.GROUP_ID] = (torch.arange(GROUPS).repeat_interleave(SIZE) + GROUPS * update).reshape(-1, 1, 1).expand(-1, T, 1)
    td[keys.INSTRUCTION_TOKENS] = policy.tokenize("go").expand(GROUPS * SIZE, T, -1).clone()
    td[keys.REQUEST_KEY] = torch.arange(GROUPS * SIZE * T).reshape(-1, T, 1) + 10_000 * update
    policy.act(td)
    td[keys.EXECUTED] = torch.tensor([True, True, False]).expand(GROUPS * SIZE, T, 3).clone()
    td[keys.STEP_REWARDS] = -(td[keys.CHUNK] - td[keys.STATE][..., None, :2]).pow(2).sum(-1)
    td[keys.DONE] = torch.zeros(GROUPS * SIZE, T, 1, dtype=torch.bool)
    td[keys.DONE][:, -1] = True
    return td


def make_grpo(**options: Any) -> TinyVLAPolicy:
    return make_policy(algorithm=GRPO, **{"group_size": SIZE, "level": "action"} | options)


def update_policy(learner: Learner, update: int, epochs: int = 2) -> float:
    """One update; returns the mean error of what was executed."""
    policy = learner.policy
    objective, td = policy.objective, make_groups(policy, update)
    batch = objective.prepare(td).reshape(-1)
    for _ in range(epochs):
        learner.step(list(batch.split(50)))
    objective.end_update()
    return -td[keys.STEP_REWARDS][td[keys.EXECUTED]].mean().item()


@pytest.mark.parametrize("head", ["gaussian", "tokens"])
def test_grpo_solves_a_bandit_without_touching_the_critic(head):
    """A sign error anywhere between the reward and the optimizer would make it worse instead."""
    policy = make_grpo(head=head)
    critic = copy.deepcopy(policy.critic.state_dict())
    learner = Learner(policy)
    errors = [update_policy(learner, update) for update in range(30)]
    assert sum(errors[-3:]) < 0.6 * sum(errors[:3]), errors
    assert all(torch.equal(value, critic[name]) for name, value in policy.critic.state_dict().items())


def test_any_split_gives_the_gradient_of_one_batch():
    policy = make_grpo(kl_coef=0.1)
    batch = policy.objective.prepare(make_groups(policy)).reshape(-1)
    whole = Learner(copy.deepcopy(policy)).step([batch])
    split = Learner(copy.deepcopy(policy)).step(list(batch.split([1, 60, 3, len(batch) - 64])))
    assert whole.abs().max() > 1e-3
    assert ((split - whole).abs().max() / whole.abs().max()).item() < 1e-6


def test_a_filtered_group_changes_neither_gradient_nor_count():
    policy = make_grpo()
    td = make_groups(policy)
    td[keys.STEP_REWARDS][:SIZE] = 0.25
    batch = policy.objective.prepare(td)
    rest = batch[SIZE:].reshape(-1)
    assert policy.training_step(batch.reshape(-1)).num_samples == policy.training_step(rest).num_samples
    both = [Learner(copy.deepcopy(policy)).step([part]) for part in (batch.reshape(-1), rest)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-7)


def test_the_reference_is_the_policy_before_the_first_step_and_stays_it():
    policy = make_grpo(kl_coef=0.1)
    first, learner = copy.deepcopy(policy), Learner(policy)
    batch = policy.objective.prepare(make_groups(policy)).reshape(-1)
    output = policy.training_step(batch)
    assert output.metrics["grpo/reference_kl"][0].item() == pytest.approx(0.0, abs=1e-6)
    learner.step([batch])
    own = copy.deepcopy(policy.state_dict())
    output = policy.training_step(batch)
    expected = first.evaluate(batch)[keys.LOG_PROB]
    torch.testing.assert_close(output.kept[keys.REFERENCE_LOG_PROB], expected)
    assert output.metrics["grpo/reference_kl"][0].item() > 1e-4
    assert all(torch.equal(value, own[name]) for name, value in policy.state_dict().items()), "the policy keeps its weights"


def test_the_penalty_keeps_the_policy_near_the_reference():
    def distance(kl_coef: float) -> float:
        policy = make_grpo(kl_coef=kl_coef)
        first, learner = copy.deepcopy(policy), Learner(policy)
        for update in range(25):
            update_policy(learner, update)
        batch = make_groups(policy, 99).reshape(-1)
        return (policy.evaluate(batch)[keys.LOG_PROB] - first.evaluate(batch)[keys.LOG_PROB]).abs().mean().item()

    assert distance(3.0) < 0.5 * distance(0.0)


def test_a_resumed_run_keeps_its_reference_and_a_new_one_takes_another():
    policy = make_grpo(kl_coef=0.1)
    learner = Learner(policy)
    update_policy(learner, 0)
    resumed = make_grpo(kl_coef=0.1)
    resumed.load_state_dict(policy.state_dict())
    resumed.objective.load_state_dict(policy.objective.state_dict())
    batch = policy.objective.prepare(make_groups(policy, 1)).reshape(-1)
    kept = [p.training_step(batch).kept[keys.REFERENCE_LOG_PROB] for p in (policy, resumed)]
    assert torch.equal(kept[0], kept[1])
    resumed.objective.reset()
    anew = resumed.training_step(batch)
    assert not torch.equal(anew.kept[keys.REFERENCE_LOG_PROB], kept[0])
    assert anew.metrics["grpo/reference_kl"][0].item() == pytest.approx(0.0, abs=1e-6)


def test_sharded_parameters_are_refused_with_the_way_out():
    """Exchanging them inside of a forward pass would silently evaluate the current policy instead."""
    policy = make_grpo(kl_coef=0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy.register_parameter("sharded", torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh)))
        with pytest.raises(ValueError, match=r"kl_coef needs whole parameters, but sharded is sharded.*reference_log_prob"):
            Reference.of(policy)
    finally:
        dist.destroy_process_group()
