"""A flow-matching policy acts and evaluates as VLAPolicy says, whatever its noise and its critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.policies.flow_fakes import HORIZON, MODEL_DIM, SPEC, A, FakeFlowPolicy, H, make_flow, observe
from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.objectives import PPO

NOISES = ("flow_sde", "flow_noise")
KINDS = [
    {"noise": noise, "value": value, "has_suffix": suffix}
    for noise in NOISES
    for value, suffix in (("prefix", True), ("prefix", False), ("suffix", True), (None, True))
]
K = 4
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['noise']}-{kind['value']}-{kind['has_suffix']}")


@kinds
def test_the_shapes_and_types_are_those_of_the_contract(kind: dict[str, Any]):
    policy = make_flow(**kind)
    td = observe(policy, 6)
    assert policy.act(td) is td
    expected: dict[Any, tuple[int, ...]] = {keys.CHUNK: (6, H, A), keys.LOG_PROB: (6, H, A)}
    if kind["noise"] == "flow_sde":
        expected |= {keys.FLOW_STEP: (6, 1), keys.FLOW_X_T: (6, HORIZON, MODEL_DIM), keys.FLOW_X_NEXT: (6, H, A)}
    else:
        expected |= {keys.FLOW_PATH: (6, K + 1, HORIZON, MODEL_DIM)}
    if kind["value"] is not None:
        expected |= {keys.VALUE: (6, 1)}
    observed = set(observe(policy, 1).keys(include_nested=True, leaves_only=True))
    assert set(td.keys(include_nested=True, leaves_only=True)) == set(expected) | observed
    for key, shape in expected.items():
        assert td[key].shape == shape
        assert td[key].dtype == (torch.int64 if key == keys.FLOW_STEP else torch.float32)
        assert not td[key].requires_grad
    evaluated = policy.evaluate(td)
    assert evaluated is not td
    assert evaluated[keys.LOG_PROB].shape == evaluated[keys.ENTROPY].shape == (6, H, A)
    assert evaluated[keys.LOG_PROB].requires_grad


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@kinds
def test_evaluate_reproduces_act_in_batches_of_any_size_and_order(kind: dict[str, Any], mode: ExplorationType):
    """A trainer's batch is never the one that was acted on; without this the ratio of an unchanged policy is not one."""
    policy = make_flow(**kind)
    with set_exploration_type(mode):
        acted = [policy.act(observe(policy, 21)[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 21))]
    td = torch.cat(acted)
    for order in (torch.arange(21), torch.randperm(21, generator=torch.Generator().manual_seed(1))):
        for size in (1, 3, 17):
            again = torch.cat([policy.evaluate(part) for part in td[order].split(size)])
            for key in (keys.LOG_PROB, keys.VALUE)[: 1 + (kind["value"] is not None)]:
                torch.testing.assert_close(again[key], td[key][order], atol=1e-5, rtol=1e-5)


@kinds
def test_batching_does_not_change_what_a_request_gets(kind: dict[str, Any]):
    policy = make_flow(**kind)
    together = policy.act(observe(policy, 6))
    shuffled = policy.act(observe(policy, 6)[torch.tensor([4, 1, 5])])
    alone = torch.cat([policy.act(observe(policy, 6)[row : row + 1]) for row in range(6)])
    for key in together.keys(include_nested=True, leaves_only=True):
        torch.testing.assert_close(alone[key], together[key], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shuffled[key], together[key][[4, 1, 5]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("noise", [*NOISES, "ode"])
def test_the_request_key_alone_determines_the_noise(noise: str):
    policy = make_flow(noise=noise)
    chunks = []
    for seed, shift in ((1, 0), (2, 0), (2, 1000)):
        torch.manual_seed(seed)
        td = observe(policy, 8)
        td[keys.REQUEST_KEY] += shift
        chunks.append(policy.act(td)[keys.CHUNK])
    assert torch.equal(chunks[0], chunks[1])
    assert (chunks[1] != chunks[2]).flatten(1).any(-1).all()
    twins = torch.cat([observe(policy, 1)] * 2)
    twins[keys.REQUEST_KEY] = torch.tensor([[1], [2]])
    first, second = policy.act(twins)[keys.CHUNK]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("noise", [*NOISES, "ode"])
def test_without_request_keys_the_noise_is_the_global_generators(noise: str):
    policy = make_flow(noise=noise)
    chunks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        chunks.append(policy.act(observe(policy, 8, with_keys=False))[keys.CHUNK])
    assert torch.equal(chunks[0], chunks[1])
    assert not torch.equal(chunks[0], chunks[2])


def test_a_deterministic_decision_is_the_odes_whatever_the_noise():
    """Evaluation of the three would not be comparable if their deterministic chunks differed."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        chunks = [make_flow(noise=noise).act(observe(make_flow(), 9))[keys.CHUNK] for noise in (*NOISES, "ode")]
    assert torch.equal(chunks[0], chunks[2])
    assert torch.equal(chunks[1], chunks[2])
    explored = make_flow(noise="flow_sde").act(observe(make_flow(), 9))[keys.CHUNK]
    assert not torch.equal(explored, chunks[2])


@pytest.mark.parametrize("noise", NOISES)
def test_a_batch_may_have_any_shape(noise: str):
    """TorchRL acts on one env without a batch, and trainers may hold [N, T]."""
    policy = make_flow(noise=noise)
    flat = policy.act(observe(policy, 6))
    grid, single = policy.act(observe(policy, 6).reshape(2, 3).clone()), policy.act(observe(policy, 6)[4].clone())
    for key in flat.keys(include_nested=True, leaves_only=True):
        torch.testing.assert_close(grid[key].flatten(0, 1), flat[key], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(single[key], flat[key][4], atol=1e-5, rtol=1e-5)
    assert policy.evaluate(grid)[keys.LOG_PROB].shape == (2, 3, H, A)
    assert policy.evaluate(single)[keys.LOG_PROB].shape == (H, A)


@pytest.mark.parametrize("noise", NOISES)
def test_the_chunk_is_the_end_of_the_stored_flow_in_the_envs_units(noise: str):
    policy = make_flow(noise=noise)
    td = policy.act(observe(policy, 40))
    if noise == "flow_noise":
        end = td[keys.FLOW_PATH][:, -1, :H, :A]
    else:
        last = td[keys.FLOW_STEP].squeeze(-1) == K - 1
        assert last.any()
        td, end = td[last], td[keys.FLOW_X_NEXT][last]
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    torch.testing.assert_close(td[keys.CHUNK], (end + 1) / 2 * (high - low) + low, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.normalize_actions(td[keys.CHUNK]), end, atol=1e-5, rtol=1e-5)


def test_unbounded_actions_are_not_scaled():
    spec = EnvSpec((-float("inf"), 0.0), (1.0, float("inf")), chunk_size=H, state_dim=5)
    chunk = torch.randn(4, H, A)
    assert torch.equal(make_flow(spec).unnormalize_actions(chunk), chunk)


@pytest.mark.parametrize("noise", NOISES)
def test_the_gradient_reaches_the_model_but_by_the_value_only_if_told(noise: str):
    """A critic that moves the model where it should only read would spoil a pretrained one."""
    for detach, value in ((True, "prefix"), (False, "prefix"), (True, "suffix"), (False, "suffix")):
        policy = make_flow(noise=noise, detach_value=detach, value=value)
        td = policy.act(observe(policy, 5))
        policy.evaluate(td)[keys.VALUE].sum().backward()
        assert policy.value_head.layers[0].weight.grad.abs().sum() > 0
        for parameter in (policy.see.weight, *([policy.suffix[0].weight] if value == "suffix" else [])):
            assert (parameter.grad is None) == detach
        policy.zero_grad()
        policy.evaluate(td)[keys.LOG_PROB].sum().backward()
        assert policy.see.weight.grad.abs().sum() > 0
        assert policy.frozen.weight.grad is None


@pytest.mark.parametrize("noise", NOISES)
def test_padding_of_the_prefix_does_not_count_in_the_value(noise: str):
    policy = make_flow(noise=noise)
    td = observe(policy, 4)
    before = policy.act(td.clone())[keys.VALUE]
    with torch.no_grad():
        policy.words.weight[0] += 100.0  # the padding's embedding
    torch.testing.assert_close(policy.act(td)[keys.VALUE], before)


def test_bfloat16_autocast_leaves_log_prob_and_value_in_float32():
    policy = make_flow(noise="flow_noise", value="suffix")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        td = policy.act(observe(policy, 8))
        again = policy.evaluate(td)
    for key in (keys.LOG_PROB, keys.VALUE):
        assert td[key].dtype == again[key].dtype == torch.float32
        torch.testing.assert_close(again[key], td[key], atol=1e-5, rtol=1e-5)


def test_ode_has_no_log_prob_and_is_refused_for_reinforcement():
    policy = make_flow(noise="ode")
    td = policy.act(observe(policy, 3))
    assert keys.LOG_PROB not in td.keys()
    with pytest.raises(RuntimeError, match="choose flow_sde or flow_noise"):
        policy.evaluate(td)
    with pytest.raises(ValueError, match=r"model\.noise='ode' has no log-prob.*choose flow_sde or flow_noise"):
        make_flow(noise="ode", objective=PPO())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, r"model\.num_steps=0 must be at least 1"),
        ({"noise": "sde"}, r"model\.noise='sde' is unknown: choose flow_sde, flow_noise or ode"),
        ({"noise_level": 0.0}, r"model\.noise_level=0\.0 must be positive"),
        ({"noise_level": float("nan")}, r"model\.noise_level=nan must be positive"),
        ({"noise_std": (0.2, 0.1)}, r"model\.noise_std=\(0\.2, 0\.1\) must be two positive limits"),
        ({"noise_hidden": [0]}, r"model\.noise_hidden=\[0\] must be positive widths"),
        ({"value": "mean"}, r"model\.value='mean' is unknown: choose prefix, suffix or null"),
        ({"value_hidden": [8, -1]}, r"model\.value_hidden=\[8, -1\] must be positive widths"),
        ({"lr": -1.0}, r"model\.lr=-1\.0 must not be negative"),
        ({"critic_lr": float("nan")}, r"model\.critic_lr=nan must not be negative"),
        ({"betas": (0.9, 1.0)}, r"model\.betas=\(0\.9, 1\.0\) must be two numbers in \[0, 1\)"),
        ({"weight_decay": -0.1}, r"model\.weight_decay=-0\.1 must not be negative"),
        ({"value": "suffix", "has_suffix": False}, r"model\.value='suffix', but the model gives no suffix features"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_flow(**options)


def test_envs_that_the_model_cannot_serve_are_refused():
    with pytest.raises(ValueError, match=r"env\.chunk_size=6 is longer than the 5 actions"):
        make_flow(EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=6, state_dim=5))
    with pytest.raises(ValueError, match="the envs take 5 action dimensions, but the model makes 4"):
        make_flow(EnvSpec((-1.0,) * 5, (1.0,) * 5, chunk_size=H, state_dim=5))
    policy = make_flow()
    policy.build(SPEC)
    with pytest.raises(ValueError, match="make a new one"):
        policy.build(EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H, state_dim=5))
    with pytest.raises(RuntimeError, match="call build"):
        FakeFlowPolicy().act(TensorDict({}, batch_size=[1]))
