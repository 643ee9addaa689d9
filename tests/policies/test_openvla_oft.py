"""OpenVLA-OFT acts and evaluates as VLAPolicy says, and refuses by name what it cannot serve."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.objectives import GRPO, PPO
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy

H, A = 3, 4
TINY: dict[str, dict[str, Any]] = {
    "dinov2": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14, "image_size": 28},
    "siglip": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 28,
    },
    "llama": {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
SPEC = EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H, state_dim=5, images={"image": (3, 32, 32), "wrist_image": (3, 24, 40)})
TEXTS = ("push the cube", "open the drawer and put the bowl in it", "lift")


def make_policy(spec: EnvSpec = SPEC, **options: Any) -> OpenVLAOFTPolicy:
    torch.manual_seed(0)
    policy = OpenVLAOFTPolicy(**{"config": TINY, "max_prompt_tokens": 30, "value": True, "temperature": 1.3} | options)
    policy.build(spec)
    with torch.no_grad():  # random logits hardly depend on what is seen; make them depend
        policy.network.lm_head.weight.mul_(30.0)
        policy.network.projector.fc3.weight.mul_(30.0)
    return policy


def observe(policy: OpenVLAOFTPolicy, rows: int) -> TensorDict:
    generator = torch.Generator().manual_seed(7)
    td = TensorDict({}, batch_size=[rows])
    for name, shape in SPEC.images.items():
        td["observation", name] = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=generator)
    td[keys.STATE] = torch.randn(rows, 5, generator=generator)
    td[keys.INSTRUCTION_TOKENS] = torch.stack([policy.tokenize(TEXTS[row % len(TEXTS)]) for row in range(rows)])
    td[keys.REQUEST_KEY] = torch.arange(100, 100 + rows).unsqueeze(-1)
    return td


VARIANTS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"attention": "causal"},
    "state": {"use_state": True, "state_statistics": {"q01": [-2.0] * 5, "q99": [2.0] * 5}},
    "one camera": {"cameras": ["wrist_image"], "image_crop": 0.9},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluate_gives_what_act_reported_in_any_batch_and_order(variant):
    """A decision's log-prob and value must not depend on the batch it was answered or trained in, nor on padding."""
    policy = make_policy(**VARIANTS[variant])
    acted = policy.act(observe(policy, 17))
    assert acted[keys.LOG_PROB].shape == (17, H, A)
    assert acted[keys.TOKENS].dtype == torch.int64
    for rows in ([4], [16, 0, 9], torch.randperm(17, generator=torch.Generator().manual_seed(1)).tolist()):
        again = policy.evaluate(acted[torch.tensor(rows)])
        for key in (keys.LOG_PROB, keys.VALUE):
            torch.testing.assert_close(again[key], acted[key][rows], atol=1e-5, rtol=1e-5)
    assert again[keys.LOG_PROB].requires_grad
    assert not acted[keys.LOG_PROB].requires_grad
    spread = acted[keys.LOG_PROB].std(0).mean()
    assert spread > 0.1, "the decisions hardly differ, so the test would see no mix-up of rows"


def test_the_request_key_alone_determines_the_tokens():
    policy = make_policy()
    torch.manual_seed(1)
    together = policy.act(observe(policy, 5))
    torch.manual_seed(2)
    rows = torch.tensor([3, 1])
    some = policy.act(observe(policy, 5)[rows])
    assert torch.equal(some[keys.TOKENS], together[keys.TOKENS][rows])
    other = observe(policy, 5)
    other[keys.REQUEST_KEY] += 1000
    assert not torch.equal(policy.act(other)[keys.TOKENS], together[keys.TOKENS])


def test_without_request_keys_torchs_generator_draws():
    policy = make_policy()
    td = observe(policy, 2).exclude(keys.REQUEST_KEY)
    torch.manual_seed(3)
    first = policy.act(td.clone())[keys.TOKENS]
    assert not torch.equal(policy.act(td.clone())[keys.TOKENS], first)
    torch.manual_seed(3)
    assert torch.equal(policy.act(td.clone())[keys.TOKENS], first)


def test_the_mode_is_the_most_likely_bin():
    policy = make_policy()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = policy.act(observe(policy, 4))
    best = policy._log_probs(policy._run(acted), 1.3).max(-1).values
    torch.testing.assert_close(acted[keys.LOG_PROB], best)


def test_temperature_is_in_the_log_prob_and_the_bins_are_all_there_is():
    """Sampling at one temperature and training at another, or over other tokens, is the classic mistake."""
    policy = make_policy(temperature=2.0)
    acted = policy.act(observe(policy, 3))
    logits = policy._run(acted).logits.reshape(3, H, A, 256)
    independent = torch.distributions.Categorical(logits=logits / 2.0)
    torch.testing.assert_close(acted[keys.LOG_PROB], independent.log_prob(acted[keys.TOKENS]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.evaluate(acted)[keys.ENTROPY], independent.entropy(), atol=1e-5, rtol=1e-5)
    assert independent.probs.sum(-1).allclose(torch.tensor(1.0))


def test_imitation_is_cross_entropy_of_the_demonstrated_bins_without_padding():
    policy = make_policy()
    batch = observe(policy, 3)
    batch[keys.CHUNK] = torch.rand(3, H, A) * 2.0 - 1.0
    batch[keys.ACTION_IS_PAD] = torch.tensor([[False] * 3, [False, False, True], [True] * 3])
    output = policy.imitation_step(batch)
    logits, bins = policy._run(batch).logits.reshape(3, H, A, 256), policy.bins.encode(batch[keys.CHUNK])
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 2), bins.flatten(), reduction="none").reshape(3, H, A)
    assert output.num_samples == 5 * A
    torch.testing.assert_close(output.loss, nll[~batch[keys.ACTION_IS_PAD]].sum())


def test_imitation_learns():
    policy = make_policy(lr=3e-3)
    batch = observe(policy, 3)
    batch[keys.CHUNK] = torch.rand(3, H, A, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    batch[keys.ACTION_IS_PAD] = torch.zeros(3, H, dtype=torch.bool)
    optimizer = policy.configure_optimizers()
    losses = []
    for _ in range(25):
        output = policy.imitation_step(batch)
        losses.append(float(output.loss.detach()) / output.num_samples)
        optimizer.zero_grad()
        (output.loss / output.num_samples).backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_bfloat16_weights_leave_rotary_frequencies_critic_and_statistics_in_float32():
    policy = make_policy(dtype="bfloat16")
    assert policy.network.lm_head.weight.dtype == torch.bfloat16
    assert policy.network.language.rotary_emb.inv_freq.dtype == torch.float32
    acted = policy.act(observe(policy, 2))
    assert acted[keys.LOG_PROB].dtype == acted[keys.VALUE].dtype == torch.float32
    assert acted[keys.CHUNK].dtype == torch.float32
    torch.testing.assert_close(policy.evaluate(acted)[keys.LOG_PROB], acted[keys.LOG_PROB])


def test_frozen_vision_and_the_critic_have_groups_of_their_own():
    policy = make_policy(freeze="vision", lr=1e-3, critic_lr=5e-3, gradient_checkpointing=True)
    acted = policy.act(observe(policy, 2))
    policy.train()
    evaluated = policy.evaluate(acted)
    (evaluated[keys.LOG_PROB].sum() + evaluated[keys.VALUE].sum()).backward()
    assert all(p.grad is None for p in policy.network.vision.parameters())
    assert policy.network.projector.fc1.weight.grad is not None
    optimizer = policy.configure_optimizers()
    trained = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert not any(id(p) in trained for p in policy.network.vision.parameters())
    assert {trained[id(p)] for p in policy.value_head.parameters()} == {5e-3}
    assert trained[id(policy.network.lm_head.weight)] == 1e-3


@pytest.mark.parametrize("objective", [PPO, GRPO])
def test_at_the_start_of_an_update_every_ratio_is_one(objective):
    """With PPO and with GRPO; the loss must also reach the weights."""
    policy = make_policy(value=objective is PPO, objective=objective())
    batch = policy.act(observe(policy, 6))
    batch[keys.ADVANTAGE] = torch.randn(6, 1)
    batch[keys.VALUE_TARGET] = torch.randn(6, 1)
    batch[keys.LOSS_MASK] = torch.ones(6, 1, dtype=torch.bool)
    batch[keys.EXECUTED] = torch.ones(6, H, dtype=torch.bool)
    batch[keys.POLICY_VERSION] = torch.zeros(6, 1, dtype=torch.int64)
    again = policy.evaluate(batch)[keys.LOG_PROB].detach()
    assert float((again - batch[keys.LOG_PROB]).exp().sub(1.0).abs().max()) < 1e-5
    output = policy.training_step(batch)
    output.loss.backward()
    assert math.isfinite(float(output.loss))
    assert float(policy.network.lm_head.weight.grad.abs().max()) > 0.0


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ({}, {"cameras": ["image", "front"]}, r"no images for 'front'.*have \['image', 'wrist_image'\]"),
        ({"images": {}}, {}, "cameras: the envs have none"),
        ({"images": {"image": (1, 8, 8)}}, {}, "'image' has 1 channels"),
        ({"state_dim": None}, {"use_state": True}, "model.use_state=true, but the envs give no state"),
        ({}, {"use_state": True}, "the state statistics are missing: set model.state_statistics"),
        ({}, {"action_statistics": {"q01": [0.0] * A}}, "the action statistics: 'q99' is missing"),
        ({}, {"action_statistics": {"q01": [0.0], "q99": [1.0]}}, "the action statistics have 1 elements, but 4"),
        ({"action_low": (-math.inf,) * A}, {}, "the envs' actions are unbounded"),
        ({}, {"config": TINY | {"siglip": {**TINY["siglip"], "patch_size": 28}}}, "must cut images of one size alike"),
        ({}, {"config": {**TINY, "vision": {}}}, r"unknown parts \['vision'\]"),
        (
            {},
            {"config": {**TINY, "llama": {"hiden_size": 8}}},
            r"llama has fields \['hiden_size'\] that LlamaConfig does not",
        ),
        ({}, {"config": {**TINY, "actions": {"bins": 8}}}, r"actions has unknown fields \['bins'\]"),
        ({}, {"action_statistics": {"q01": 0.0, "q99": [1.0]}}, "q01=0.0 must be a list of numbers"),
    ],
)
def test_what_does_not_fit_the_envs_is_refused_by_name(spec, options, said):
    fields = {"action_low": SPEC.action_low, "action_high": SPEC.action_high, "chunk_size": H, "state_dim": 5}
    with pytest.raises(ValueError, match=said):
        make_policy(EnvSpec(**{**fields, "images": SPEC.images, **spec}), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.0}, "model.temperature=0.0"),
        ({"gripper": "open"}, "model.gripper='open' is unknown: choose as_is or open_is_one"),
        ({"image_crop": 1.2}, "model.image_crop=1.2"),
        ({"dataset": "libero"}, "model.dataset='libero' needs model.pretrained"),
        ({"attention": "full"}, "model.attention='full'"),
        ({"lr": -1.0}, "model.lr=-1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        OpenVLAOFTPolicy(config=TINY, **options)


def test_envs_without_a_camera_or_the_asked_for_state_are_refused_before_any_is_built():
    from vla_async.envs import ToyEnvs

    OpenVLAOFTPolicy(config=TINY).check_env(ToyEnvs(obs="rgb"))
    with pytest.raises(ValueError, match="cameras: the envs have none"):
        OpenVLAOFTPolicy(config=TINY).check_env(ToyEnvs(obs="state"))
    with pytest.raises(ValueError, match=r"model\.use_state=true, but the envs give no state"):
        OpenVLAOFTPolicy(config=TINY, use_state=True).check_env(ToyEnvs(obs="rgb"))


def test_prompts_that_are_too_long_and_other_envs_are_refused():
    policy = make_policy()
    with pytest.raises(ValueError, match=r"more than 30; raise model\.max_prompt_tokens"):
        policy.tokenize("put " * 30)
    policy.build(SPEC)  # the same envs again: without effect
    with pytest.raises(ValueError, match="the policy was built for"):
        policy.build(EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H + 1, state_dim=5, images=SPEC.images))


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_decisions_may_have_any_batch_dimensions(shape):
    """TorchRL's own envs and collectors give a single decision without any, and a rollout of several envs two."""
    policy = make_policy()
    td = observe(policy, math.prod(shape))
    acted = policy.act(td.clone().reshape(shape))
    assert acted[keys.CHUNK].shape == (*shape, H, A)
    torch.testing.assert_close(acted[keys.CHUNK].reshape(-1, H, A), policy.act(td)[keys.CHUNK])
    again = policy.evaluate(acted)
    for key in (keys.LOG_PROB, keys.VALUE):
        torch.testing.assert_close(again[key], acted[key], atol=1e-5, rtol=1e-5)


def test_a_checkpoint_restores_weights_and_statistics(tmp_path):
    from lightning.pytorch import Trainer

    policy = make_policy(action_statistics={"q01": [-3.0] * A, "q99": [3.0] * A})
    file = tmp_path / "policy.ckpt"
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(policy)
    trainer.save_checkpoint(file, weights_only=True)
    again = OpenVLAOFTPolicy.load_from_checkpoint(file, weights_only=True)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        before, after = policy.act(observe(policy, 2)), again.act(observe(again, 2))
    assert torch.equal(before[keys.CHUNK], after[keys.CHUNK])
    assert float(before[keys.CHUNK].abs().max()) > 1.0
    assert again.hparams == policy.hparams
