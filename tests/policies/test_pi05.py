"""π0.5: cached velocities equal a joint forward pass written out here, and weights in the layout of the release load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tests.policies.test_pi0 import load, sizes, write_tokenizer
from tests.policies.vla_fakes import SPEC, assert_independent_of_the_batch, observations, randomize, tiny_pi0_config
from vla_async import keys
from vla_async.policies.images import resize_with_pad
from vla_async.policies.pi05 import Pi05Policy


def make(**options: Any) -> Pi05Policy:
    policy = Pi05Policy(**{"config": tiny_pi0_config(), "num_steps": 3, "max_tokens": 60} | options)
    policy.build(SPEC)
    randomize(policy)
    return policy


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("value", ["prefix", "suffix"])
def test_no_decision_depends_on_its_batch(noise: str, value: str):
    """Padding or another row that leaks through an attention mask would change the log-prob with the batch."""
    assert_independent_of_the_batch(make(noise=noise, value=value))


# ---------------------------------------------------------------- an independent forward pass


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[B, heads, S, d]`` with base 10,000."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / 10_000.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)


def adaptive(norm: Any, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
    scale, shift, gate = (condition @ norm.dense.weight.T + norm.dense.bias)[:, None].chunk(3, dim=-1)
    return rms(x) * (1 + scale) + shift, gate


def heads(attention: Any, x: Tensor) -> list[Tensor]:
    """Queries, keys and values ``[B, 2, S, 8]``; the one head of keys and values serves both of queries."""
    made = [
        (x @ p.weight.T).unflatten(-1, (-1, 8)).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    return [made[0], made[1].expand(-1, 2, -1, -1), made[2].expand(-1, 2, -1, -1)]


def joint_velocity(policy: Pi05Policy, images: Tensor, tokens: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """One pass over prefix and suffix together, without a cache: the prefix sees itself, the suffix sees all."""
    model: Any = policy.network
    fraction = torch.linspace(0, 1, 8)
    angles = 2 * math.pi * t[:, None] / (4e-3 * (4.0 / 4e-3) ** fraction)
    time = model.time_embedding(t)  # in float32 an angle of 1500 has three digits, so it is taken over once it is right
    torch.testing.assert_close(time, torch.cat([angles.sin(), angles.cos()], dim=-1), rtol=0, atol=5e-4)
    condition = functional.silu(model.time_mlp_out(functional.silu(model.time_mlp_in(time))))
    words = model.vlm.language_model.embed_tokens.weight[tokens] * 24**0.5
    prefix, suffix = torch.cat([images, words], dim=1), model.action_in_proj(x_t)
    n, s = prefix.shape[1], suffix.shape[1]
    valid = torch.cat(
        [torch.ones(images.shape[:2], dtype=torch.bool), tokens != 0, torch.ones(len(x_t), s, dtype=torch.bool)], dim=1
    )
    positions = valid.cumsum(1) - 1
    sees = valid[:, None, None, :].expand(-1, 1, n + s, -1).clone()
    sees[:, :, :n, n:] = False
    for reader, actor in zip(model.vlm.language_model.layers, model.expert.layers, strict=True):
        normed = rms(prefix) * (1 + reader.input_layernorm.weight)
        moved, gate = adaptive(actor.input_layernorm, suffix, condition)
        parts = zip(heads(reader.self_attn, normed), heads(actor.self_attn, moved), strict=True)
        queries, key, value = (torch.cat(part, dim=2) for part in parts)
        scores = rotate(queries, positions) @ rotate(key, positions).transpose(-1, -2) / 8**0.5
        read = (scores.masked_fill(~sees, -math.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)
        prefix = prefix + read[:, :n] @ reader.self_attn.o_proj.weight.T
        suffix = suffix + gate * (read[:, n:] @ actor.self_attn.o_proj.weight.T)
        prefix = prefix + reader.mlp(rms(prefix) * (1 + reader.post_attention_layernorm.weight))
        moved, gate = adaptive(actor.post_attention_layernorm, suffix, condition)
        suffix = suffix + gate * actor.mlp(moved)
    return model.action_out_proj(adaptive(model.expert.norm, suffix, condition)[0])


@torch.no_grad()
def test_the_cached_velocity_equals_a_joint_forward_pass():
    """Anything that differs, a mask, a position, a gate, makes released weights give other actions."""
    policy = make()
    td = observations(policy, 4)
    x_t, t = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(5)), torch.tensor([0.05, 0.4, 0.7, 1.0])
    cameras = [resize_with_pad(td["observation", name], 28, 28) for name in ("image", "wrist")]
    images = torch.cat([policy.vlm.get_image_features(camera).pooler_output for camera in cameras], dim=1)
    bins = (torch.floor((td[keys.STATE] + 1) * 128).clamp(-1, 255)).long()
    tokens = policy.prompt.with_state(td[keys.INSTRUCTION_TOKENS], bins)
    expected = joint_velocity(policy, images, tokens, x_t, t)
    prefix = policy.prefix(td)
    first, second = (policy.velocity(prefix, x_t, t) for _ in range(2))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second), "a velocity has changed the cache"


def test_open_gates_and_plain_scales_make_it_transformers_gemma():
    """With the condition ignored, the expert is a plain Gemma; transformers' own layers must agree."""
    from transformers import GemmaModel

    policy = make()
    theirs = GemmaModel(policy.sizes.make_config().dit_config).eval()
    randomize(theirs, seed=2)
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "norm" not in name and "embed" not in name}
    policy.expert.load_state_dict(weights, strict=False)
    norms = [name.removesuffix(".weight") for name in theirs.state_dict() if "norm" in name]
    for name in norms:
        dense: Any = policy.expert.get_submodule(name).dense
        scale = theirs.get_submodule(name).weight
        with torch.no_grad():
            dense.weight.zero_()
            dense.bias.copy_(torch.cat([scale, torch.zeros(16), torch.ones(16)]))
    embeddings = torch.randn(3, 5, 16)
    from vla_async.policies.paligemma import PrefixCache, run_suffix

    nothing = [(torch.zeros(3, 1, 0, 8), torch.zeros(3, 1, 0, 8))] * 2
    cache = PrefixCache(nothing, torch.ones(3, 0, dtype=torch.bool))
    ours = run_suffix(policy.expert, embeddings, torch.zeros(5, dtype=torch.int64), cache, condition=torch.randn(3, 16))
    mask = torch.ones(3, 1, 5, 5, dtype=torch.bool)
    expected = theirs(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- the prompt


def test_the_state_stands_in_the_prompt():
    """The state reaches the model only as text, in 256 bins over [-1, 1], -1 below."""
    policy = make()
    td = observations(policy, 2)
    td[keys.STATE] = torch.tensor([[-1.5, -1.0, 0.0, 0.999, 7.0], [0.5, 0.25, -0.5, 0.1, 0.2]])
    seen: list[Tensor] = []
    read = policy.read_prefix
    policy.read_prefix = lambda td, tokens, state: (seen.append(tokens), read(td, tokens, state))[1]  # type: ignore[method-assign]
    policy.prefix(td)
    tokenizer: Any = policy.prompt.tokenizer
    for row, text in enumerate(
        [
            "Task: push the cube, State: -1 0 128 255 255;\nAction: ",
            "Task: put the red bowl on the plate, State: 192 160 64 140 153;\nAction: ",
        ]
    ):
        expected = [tokenizer.bos_id, *tokenizer(text)]
        assert seen[0][row, : len(expected)].tolist() == expected
        assert (seen[0][row, len(expected) :] == tokenizer.pad_id).all()


def test_the_state_may_be_padded_in_the_prompt():
    """LeRobot's fine-tuned models have seen 32 numbers there, zeros behind the robot's own."""
    policy = make(prompt_state_dim=8)
    text = "Task: stack, State: 128 128 128 128 128 128 128 128;\nAction: "
    td = observations(policy, 3)[2:]
    td[keys.STATE] = torch.zeros(1, 5)
    state = functional.pad(policy.state_normalizer.normalize(td[keys.STATE]), (0, 3))
    assert torch.equal(state, torch.zeros(1, 8))
    chunk = policy.act(td.clone())[keys.CHUNK]
    tokenizer: Any = policy.prompt.tokenizer
    ids = [tokenizer.bos_id, *tokenizer(text)]
    direct = policy.read_prefix(td, torch.tensor([ids + [0] * (60 - len(ids))]), None)
    torch.testing.assert_close(policy.prefix(td).features, direct.features)
    assert torch.isfinite(chunk).all()


def test_every_input_reaches_the_chunk():
    """An observation that is read but not used would pass all tests of equality."""
    policy = make()
    chunk = policy.act(observations(policy, 4))[keys.CHUNK]
    for name in (("observation", "image"), ("observation", "wrist"), keys.STATE, keys.INSTRUCTION_TOKENS):
        td = observations(policy, 4)
        td[name] = td[name].flip(0)
        assert not torch.allclose(policy.act(td)[keys.CHUNK], chunk, atol=1e-4), name


def test_gradients_reach_every_part_and_survive_checkpointing():
    """The time's condition reaches the layers as a further argument, which checkpointing must carry along."""
    gradients = []
    for checkpointing in (False, True):
        policy = make(gradient_checkpointing=checkpointing)
        policy.train()
        policy.evaluate(policy.act(observations(policy, 4)))[keys.LOG_PROB].sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for part in ("vision_tower", "language_model", "expert.layers.0.input_layernorm.dense", "time_mlp_in", "action_in_proj"):
        assert any(part in name and gradient.abs().sum() > 0 for name, gradient in gradients[0].items()), part
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_bfloat16_weights_give_float32_decisions():
    """The adaptive norms take a float32 condition into bfloat16 layers."""
    policy = make(dtype="bfloat16")
    td = policy.act(observations(policy, 4))
    # bfloat16 frequencies turn distant tokens by wrong angles
    assert {buffer.dtype for name, buffer in policy.named_buffers() if name.endswith("inv_freq")} == {torch.float32}
    assert td[keys.CHUNK].dtype == td[keys.LOG_PROB].dtype == torch.float32
    torch.testing.assert_close(policy.evaluate(td)[keys.LOG_PROB], td[keys.LOG_PROB], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- releases


def in_release_layout(policy: Pi05Policy) -> dict[str, Tensor]:
    """The policy's weights under the names of ``lerobot/pi05_base``."""
    released = {}
    for name, tensor in policy.network.state_dict().items():
        name = name.replace("vlm.vision_tower.", "vlm.vision_tower.vision_model.")
        name = name.replace("vlm.", "paligemma_with_expert.paligemma.model.")
        name = name.replace("expert.layers", "paligemma_with_expert.gemma_expert.model.layers")
        name = name.replace("expert.norm", "paligemma_with_expert.gemma_expert.model.norm")
        name = name.replace("paligemma.model.language_model.embed_tokens.", "paligemma.lm_head.")
        released[name] = tensor.clone()
    return released | {"paligemma_with_expert.gemma_expert.lm_head.weight": torch.ones(300, 16)}


def test_weights_of_a_release_load_back_equal(tmp_path: Path):
    """A name that the map misses would be refused; one that it confuses gives other decisions."""
    policy = make(tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    tensors = in_release_layout(policy)
    assert "paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.dense.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"type": "pi05", "chunk_size": 5, "max_state_dim": 8, "max_action_dim": 6}')
    loaded = load(Pi05Policy, tmp_path, config=sizes(), max_tokens=60)
    a, b = (one.act(observations(one, 4))[keys.CHUNK] for one in (policy, loaded))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_weights_of_pi0_are_refused_by_name(tmp_path: Path):
    """π0's norms and state projection have no place in π0.5."""
    tensors = in_release_layout(make())
    name = "paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm."
    del tensors[name + "dense.weight"]
    tensors |= {name + "weight": torch.ones(16), "state_proj.weight": torch.ones(16, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        load(Pi05Policy, tmp_path, config=tiny_pi0_config())
    assert "1 missing: expert.layers.0.input_layernorm.dense.weight" in str(refused.value)
    assert f"2 unexpected: {name}weight, state_proj.weight" in str(refused.value)


# ---------------------------------------------------------------- refusals


def test_a_prompt_that_could_become_too_long_is_refused_at_the_instruction():
    """The numbers of a state have one to three digits; the longest must be refused before an episode starts."""
    policy = make(max_tokens=30)
    assert policy.tokenize("stack").shape == (256,)
    with pytest.raises(ValueError, match=r"raise model\.max_tokens"):
        policy.tokenize("open the top drawer of the cabinet slowly and with care")
    with pytest.raises(ValueError, match=r"raise model\.max_bytes"):
        make(max_bytes=8).tokenize("push the cube")


def test_settings_that_cannot_work_are_refused():
    """Each error must name the setting."""
    with pytest.raises(ValueError, match=r"model\.max_bytes=0 must be at least 1"):
        Pi05Policy(max_bytes=0)
    with pytest.raises(ValueError, match=r"model\.prompt_state_dim=4 is below the envs' 5 state elements"):
        Pi05Policy(config=tiny_pi0_config(), prompt_state_dim=4).build(SPEC)
