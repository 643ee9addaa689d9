"""The tiny policy acts and evaluates as VLAPolicy says."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.envs import EnvSpec

HEADS = ("gaussian", "tokens")
ACTED = (keys.CHUNK, keys.LOG_PROB, keys.VALUE)


@pytest.mark.parametrize("head", HEADS)
def test_the_shapes_and_types_are_those_of_the_contract(make_policy, image_spec, observe, head):
    policy = make_policy(image_spec, head=head)
    td = observe(policy, 4)
    out = policy.act(td)
    assert out is td
    shapes = {keys.CHUNK: (4, 3, 2), keys.LOG_PROB: (4, 3, 2), keys.VALUE: (4, 1)}
    if head == "tokens":
        assert td[keys.TOKENS].dtype == torch.int64
        assert td[keys.TOKENS].shape == (4, 3, 2)
    for key, shape in shapes.items():
        assert td[key].shape == shape
        assert td[key].dtype == torch.float32
        assert not td[key].requires_grad
    evaluated = policy.evaluate(td)
    assert evaluated is not td
    assert {key: evaluated[key].shape for key in (keys.LOG_PROB, keys.ENTROPY, keys.VALUE)} == {
        keys.LOG_PROB: (4, 3, 2),
        keys.ENTROPY: (4, 3, 2),
        keys.VALUE: (4, 1),
    }


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("head", HEADS)
def test_evaluate_recomputes_exactly_what_act_reported(make_policy, image_spec, observe, head, mode):
    policy = make_policy(image_spec, head=head)
    with set_exploration_type(mode):
        td = policy.act(observe(policy, 16))
    evaluated = policy.evaluate(td)
    torch.testing.assert_close(evaluated[keys.LOG_PROB], td[keys.LOG_PROB], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(evaluated[keys.VALUE], td[keys.VALUE], atol=1e-6, rtol=1e-6)
    assert evaluated[keys.LOG_PROB].requires_grad


@pytest.mark.parametrize("head", HEADS)
def test_batching_does_not_change_what_a_request_gets(make_policy, image_spec, observe, head):
    policy = make_policy(image_spec, head=head)
    together = policy.act(observe(policy, 6))
    shuffled = observe(policy, 6)[torch.tensor([4, 1, 5])]
    alone = [policy.act(observe(policy, 6)[row : row + 1]) for row in range(6)]
    policy.act(shuffled)
    for key in ACTED:
        torch.testing.assert_close(torch.cat([td[key] for td in alone]), together[key], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shuffled[key], together[key][[4, 1, 5]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_the_request_key_alone_determines_the_noise(make_policy, spec, observe, head):
    policy = make_policy(spec, head=head)
    torch.manual_seed(1)
    first = policy.act(observe(policy, 8))[keys.CHUNK]
    torch.manual_seed(2)
    assert torch.equal(policy.act(observe(policy, 8))[keys.CHUNK], first)
    other = observe(policy, 8)
    other[keys.REQUEST_KEY] += 1000
    assert (policy.act(other)[keys.CHUNK] != first).any(-1).any(-1).float().mean() > 0.8
    # the same observation under two keys gets two chunks
    twins = observe(policy, 1).expand(2).clone()
    twins[keys.REQUEST_KEY] = torch.tensor([[1], [2]])
    chunks = policy.act(twins)[keys.CHUNK]
    assert not torch.equal(chunks[0], chunks[1])


@pytest.mark.parametrize("head", HEADS)
def test_without_request_keys_the_noise_is_the_global_generators(make_policy, spec, observe, head):
    policy = make_policy(spec, head=head)
    chunks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        chunks.append(policy.act(observe(policy, 8, with_keys=False))[keys.CHUNK])
    assert torch.equal(chunks[0], chunks[1])
    assert not torch.equal(chunks[0], chunks[2])


@pytest.mark.parametrize("head", HEADS)
def test_the_mode_ignores_the_key_and_is_at_least_as_likely_as_any_sample(make_policy, spec, observe, head):
    policy = make_policy(spec, head=head)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        mode = policy.act(observe(policy, 8))
        other = observe(policy, 8)
        other[keys.REQUEST_KEY] += 1000
        assert torch.equal(policy.act(other)[keys.CHUNK], mode[keys.CHUNK])
    sample = policy.act(observe(policy, 8))
    assert (mode[keys.LOG_PROB] >= sample[keys.LOG_PROB]).all()
    assert not torch.equal(mode[keys.CHUNK], sample[keys.CHUNK])


@pytest.mark.parametrize("head", HEADS)
def test_samples_follow_the_reported_probabilities(make_policy, head):
    spec = EnvSpec((-1.0,), (3.0,), chunk_size=1, state_dim=1)
    policy = make_policy(spec, head=head, num_bins=5)
    rows = 20_000
    td = TensorDict({keys.INSTRUCTION_TOKENS: policy.tokenize("x").expand(rows, -1)}, batch_size=[rows])
    td[keys.STATE], td[keys.REQUEST_KEY] = torch.full((rows, 1), 0.5), torch.arange(rows).unsqueeze(-1)
    policy.act(td)
    chunk, entropy = td[keys.CHUNK].flatten(), policy.evaluate(td)[keys.ENTROPY].flatten()
    assert -td[keys.LOG_PROB].mean().item() == pytest.approx(entropy[0].item(), abs=0.02)
    if head == "tokens":
        log_probs = td[keys.LOG_PROB].flatten().tolist()
        probabilities = {round(a, 4): math.exp(p) for a, p in zip(chunk.tolist(), log_probs, strict=True)}
        assert set(probabilities) == {-1.0, 0.0, 1.0, 2.0, 3.0}, "the bins span the bounds and include both"
        for action, probability in probabilities.items():
            assert (chunk == action).float().mean().item() == pytest.approx(probability, abs=0.015)
    else:
        # init_std is a share of half the range, which is 2
        assert chunk.std().item() == pytest.approx(0.5 * 2, rel=0.02)


def test_gaussian_log_prob_and_entropy_are_those_of_torch(make_policy, spec, observe):
    policy = make_policy(spec, init_std=0.3)
    td = policy.act(observe(policy, 4))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        mean = policy.act(observe(policy, 4))[keys.CHUNK]
    normal = torch.distributions.Normal(mean, 0.3)
    torch.testing.assert_close(td[keys.LOG_PROB], normal.log_prob(td[keys.CHUNK]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.evaluate(td)[keys.ENTROPY], normal.entropy(), atol=1e-5, rtol=1e-5)


def test_the_deviation_stays_in_its_limits_and_can_come_back_from_them(make_policy, spec):
    head = make_policy(spec, init_std=0.5, min_std=0.1, max_std=1.0).head
    assert head.log_std.exp().tolist() == pytest.approx([0.5, 0.5])
    with torch.no_grad():
        head.std_logit.copy_(torch.tensor([-5.0, 5.0]))
    assert 0.1 < head.log_std.exp()[0] < 0.11
    assert 0.9 < head.log_std.exp()[1] < 1.0
    (gradient,) = torch.autograd.grad(head.log_std.sum(), head.std_logit)
    assert (gradient > 0).all()


def test_saturated_demonstrations_are_bins_of_the_token_head(make_policy, image_spec):
    head = make_policy(image_spec, head="tokens", num_bins=7).head
    ends = torch.tensor([[-2.0, 0.0], [2.0, 0.5], [-9.0, 9.0]])
    assert head.tokens(ends).tolist() == [[0, 0], [6, 6], [0, 6]]
