"""Corrections for the age of the data on a real policy: equal on fresh data, exact under any split, better on stale data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.numerics.learner import A, H, Learner, N, T, make_policy, make_rollout
from vla_async import keys
from vla_async.policies import TinyVLAPolicy

CORRECTED = ("truncated_is", "decoupled", "vtrace")
LEVELS = ("token", "action", "chunk")


def prepared(policy: TinyVLAPolicy, rollout: TensorDict) -> TensorDict:
    """What a loop hands to the loss: the proximal log-prob first where the advantages need it."""
    if policy.objective.needs_proximal == "prepare":
        policy.objective.recompute(policy, rollout, micro_batch_size=6)
    return policy.objective.prepare(rollout).reshape(-1)


def moved(policy: TinyVLAPolicy, by: float = 0.05) -> TinyVLAPolicy:
    """The policy some updates later."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return policy


@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head", ["gaussian", "tokens"])
def test_on_fresh_data_with_a_learning_rate_of_zero_every_correction_is_plain_ppo(head, level, correction):
    """In loss and gradient, at the first step and at later ones, with the proximal log-prob kept from the first."""
    plain = Learner(make_policy(head, lr=0.0, level=level))
    corrected = Learner(make_policy(head, lr=0.0, level=level, correction=correction))
    batches = {learner: prepared(learner.policy, make_rollout(learner.policy)) for learner in (plain, corrected)}
    for _ in range(3):
        outputs, gradients = [], []
        for learner, batch in batches.items():
            output = learner.policy.training_step(batch)
            batch.update(dict(output.kept))
            outputs.append(output)
            gradients.append(learner.step([batch]))
            learner.policy.objective.ends_update({})
        torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
        for name in ("log_ratio", "log_prob_gap", "capped_fraction"):
            total, count = outputs[1].metrics[f"ppo/{name}"]
            assert count > 0
            assert float(total) / count < 1e-5, name
        weight, count = outputs[1].metrics["ppo/importance_weight"]
        assert float(weight) / count == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("level", LEVELS)
def test_any_split_of_stale_data_gives_the_gradient_of_one_batch(level, correction):
    policy = make_policy(level=level, correction=correction, entropy_coef=0.01)
    rollout = make_rollout(policy)
    batch = prepared(moved(policy), rollout)
    whole = Learner(copy.deepcopy(policy)).step([batch])
    split = Learner(copy.deepcopy(policy)).step(list(batch.split([1, 7, 2, N * T - 10])))
    assert whole.abs().max() > 1e-3
    assert ((split - whole).abs().max() / whole.abs().max()).item() < 1e-6


@pytest.mark.parametrize("correction", ["truncated_is", "decoupled"])
def test_streaming_the_proximal_policy_is_recomputing_it(correction):
    """Two epochs, the first of which streams: the parameters end up as if the batch had been recomputed first."""

    def train(recompute: bool) -> torch.Tensor:
        policy = make_policy(correction=correction, level="action")
        rollout = make_rollout(policy)
        batch = prepared(moved(policy), rollout)
        learner, objective = Learner(policy), policy.objective
        if recompute:
            objective.recompute(policy, batch, micro_batch_size=9)
        micros = list(batch.split(6))
        for _ in range(2):
            for micro in micros:
                output = policy.training_step(micro)
                micro.update(dict(output.kept))
                learner.fabric.backward(output.loss, num_samples=output.num_samples)
            learner.optimizer.step()
            learner.optimizer.zero_grad()
            objective.ends_update({})
            micros = list(torch.cat(micros)[torch.randperm(N * T, generator=torch.Generator().manual_seed(2))].split(4))
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    torch.testing.assert_close(train(recompute=False), train(recompute=True), rtol=1e-6, atol=1e-6)


def test_the_gap_between_rollout_and_trainer_is_seen_whatever_the_correction():
    """The behaviour policy is older by one move; the reported gap is the mean distance of the two log-probs."""
    for correction in ("none", *CORRECTED):
        policy = make_policy(correction=correction, level="token")
        rollout = make_rollout(policy)
        batch = prepared(moved(policy), rollout)
        total, count = policy.training_step(batch).metrics["ppo/log_prob_gap"]
        executed = batch[keys.EXECUTED].unsqueeze(-1).expand_as(batch[keys.LOG_PROB])
        gap = (policy.evaluate(batch)[keys.LOG_PROB] - batch[keys.LOG_PROB]).abs()[executed].mean()
        assert float(total) / count == pytest.approx(gap.item(), rel=1e-4)
        assert gap > 1e-3


def remaining_error(correction: str, age: int) -> float:
    """Error at the end of training a bandit on data that is ``age`` updates old, as a share of the error at its start."""
    policy = make_policy(lr=1e-2, level="action", gamma=0.9, correction=correction)
    learner, queue, errors = Learner(policy), [], []
    for update in range(40 + age):
        td = TensorDict({}, batch_size=[64, 1])
        td[keys.STATE] = torch.rand(64, 1, 4, generator=torch.Generator().manual_seed(update)) - 0.5
        td[keys.INSTRUCTION_TOKENS] = policy.tokenize("go").expand(64, 1, -1).clone()
        td[keys.REQUEST_KEY] = torch.arange(64).reshape(64, 1, 1) + 64 * update
        policy.act(td)
        td[keys.STEP_REWARDS] = -(td[keys.CHUNK] - td[keys.STATE][..., None, :A]).pow(2).sum(-1)
        td[keys.EXECUTED] = torch.ones(64, 1, H, dtype=torch.bool)
        td[keys.DONE] = td[keys.TERMINATED] = torch.ones(64, 1, 1, dtype=torch.bool)
        td[keys.NEXT_VALUE] = torch.full((64, 1, 1), float("nan"))
        errors.append(-td[keys.STEP_REWARDS].mean().item())
        queue.append(td)
        if len(queue) > age:
            train_update(learner, prepared(policy, queue.pop(0)))
    return sum(errors[-5:]) / sum(errors[:5])


def train_update(learner: Learner, batch: TensorDict, epochs: int = 3) -> None:
    """One update with one mini-batch, whose proximal log-prob is kept from the first epoch."""
    objective: Any = learner.policy.objective
    for _ in range(epochs):
        output = learner.policy.training_step(batch)
        batch.update(dict(output.kept))
        learner.step([batch])
        objective.ends_update({})
    objective.end_update()


def test_corrections_learn_from_data_that_is_four_updates_old():
    """Without one, most of it is clipped away. A sign error in a weight would make the corrected ones worse than that."""
    fresh, plain = remaining_error("none", age=0), remaining_error("none", age=4)
    assert fresh < 0.3
    assert remaining_error("truncated_is", age=4) < 0.9 * plain
    for correction in ("decoupled", "vtrace"):
        assert remaining_error(correction, age=4) < min(0.5 * plain, fresh + 0.2)
