"""SmolVLA's own: what sees what, the sizes and the files of its release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.policies.released_fakes import (
    config_json,
    in_release_layout,
    make,
    tiny_config,
    vlm_sizes,
    write_release,
    write_tokenizer,
)
from tests.policies.vla_fakes import SPEC, observations
from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies.processing import pad_last
from vla_async.policies.smolvla import KEY_MAP, SmolVLAPolicy


def test_the_prefix_is_that_of_transformers_language_model():
    """A mask, a position or a scale that differs makes released weights give other actions."""
    from transformers import LlamaConfig, LlamaModel

    policy = make(SmolVLAPolicy)
    td = observations(policy, 4)
    network, prefix = policy.network, policy.prefix(td)
    text = LlamaModel(LlamaConfig(**policy.sizes.text_config, attn_implementation="eager")).eval()
    own = {name.replace("block.", ""): tensor for name, tensor in network.state_dict().items()}
    weights = {name: own["embedding.weight" if name.startswith("embed_tokens") else name] for name in text.state_dict()}
    text.load_state_dict(weights)
    mask = prefix.mask
    images = policy.cameras.read(td)[0]
    tokens, state = td[keys.INSTRUCTION_TOKENS], pad_last(td[keys.STATE], 8)
    shown = [torch.nn.functional.pad(_small(image), _padding(image), value=-1.0) for image in images]
    embedded, valid = network._embed(shown, torch.ones(4, 2, dtype=torch.bool), tokens, tokens != 0, state)
    assert torch.equal(valid, mask)
    allowed = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1).clone()
    allowed[:, :, :-1, -1] = False
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = text(inputs_embeds=embedded, attention_mask=additive, position_ids=positions).last_hidden_state
    torch.testing.assert_close(prefix.features[mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert mask[:, :8].all(), "two cameras of four tokens each"


def _small(image: torch.Tensor) -> torch.Tensor:
    ratio = max(image.shape[-1], image.shape[-2]) / 32
    size = int(image.shape[-2] / ratio), int(image.shape[-1] / ratio)
    return torch.nn.functional.interpolate(image.float() / 127.5 - 1.0, size, mode="bilinear")


def _padding(image: torch.Tensor) -> tuple[int, int, int, int]:
    rows, columns = _small(image).shape[-2:]
    return 32 - columns, 0, 32 - rows, 0


def test_nothing_but_the_actions_sees_the_state_and_an_action_sees_no_later_one():
    """The release was trained so; seeing more is not an improvement, but another model."""
    policy = make(SmolVLAPolicy)
    td, other = observations(policy, 3), observations(policy, 3)
    other[keys.STATE] += 1.0
    prefix, moved = policy.prefix(td), policy.prefix(other)
    torch.testing.assert_close(prefix.features[:, :-1], moved.features[:, :-1])
    assert not torch.allclose(prefix.features[:, -1], moved.features[:, -1], atol=1e-3)
    x_t, t = torch.randn(3, 5, 6), torch.full((3,), 0.5)
    changed = x_t.clone()
    changed[:, 3:] += 1.0
    first, second = policy.velocity(prefix, x_t, t), policy.velocity(prefix, changed, t)
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 4], second[:, 4], atol=1e-4)


def test_a_camera_that_is_masked_out_is_as_if_it_were_not_there():
    """A black image that is looked at, or that takes positions, would change every action."""
    alone = EnvSpec(SPEC.action_low, SPEC.action_high, 3, 5, {"image": SPEC.images["image"]})
    one, masked = make(SmolVLAPolicy, alone), make(SmolVLAPolicy, cameras=["image", None])
    td = observations(masked, 4)
    torch.testing.assert_close(masked.act(td.clone())[keys.CHUNK], one.act(td)[keys.CHUNK], rtol=1e-5, atol=1e-5)


def test_the_default_sizes_are_those_of_the_release():
    """Shapes of ``lerobot/smolvla_base``, as its safetensors header lists them."""
    from vla_async.policies.checkpoints import _rename
    from vla_async.policies.smolvla_network import SmolVLANetwork, SmolVLASizes

    with torch.device("meta"):
        network = SmolVLANetwork(SmolVLASizes())
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    vlm, expert = "model.vlm_with_expert.vlm.model.", "model.vlm_with_expert.lm_expert."
    for name, shape in {
        f"{vlm}connector.modality_projection.proj.weight": [960, 12288],
        f"{vlm}text_model.embed_tokens.weight": [49280, 960],
        f"{vlm}text_model.layers.15.mlp.gate_proj.weight": [2560, 960],
        f"{vlm}text_model.layers.0.self_attn.k_proj.weight": [320, 960],
        f"{vlm}vision_model.embeddings.patch_embedding.weight": [768, 3, 16, 16],
        f"{expert}layers.8.self_attn.k_proj.weight": [320, 720],
        f"{expert}layers.9.self_attn.k_proj.weight": [320, 320],
        f"{expert}layers.9.self_attn.q_proj.weight": [960, 720],
        f"{expert}layers.9.mlp.down_proj.weight": [720, 2048],
        f"{expert}norm.weight": [720],
        "model.state_proj.weight": [960, 32],
        "model.action_time_mlp_in.weight": [720, 1440],
        "model.action_out_proj.bias": [32],
    }.items():
        assert shapes[_rename(name, KEY_MAP)] == shape, name
    assert _rename("model.vlm_with_expert.vlm.lm_head.weight", KEY_MAP) == ""
    assert "layers.16.block.mlp.up_proj.weight" not in shapes


def test_statistics_that_lerobot_stores_beside_the_weights_are_used(tmp_path: Path):
    """They are what the weights were trained with; a run that ignores them acts in the wrong units."""
    tokenizer = write_tokenizer(tmp_path)
    policy = make(SmolVLAPolicy, tokenizer=tokenizer)
    release = Path(write_release(tmp_path / "release", policy, in_release_layout(policy)))
    state = {"observation.state.mean": torch.arange(5.0), "observation.state.std": torch.full((5,), 2.0)}
    action = {"action.mean": torch.tensor([1.0, 2.0, 3.0]), "action.std": torch.tensor([0.5, 1.0, 2.0])}
    save_file(state | action, release / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    save_file(action, release / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    loaded = SmolVLAPolicy(pretrained=str(release), tokenizer=tokenizer, config=vlm_sizes(SmolVLAPolicy))
    loaded.build(SPEC)
    torch.testing.assert_close(loaded.unnormalize_actions(torch.ones(3)), torch.tensor([1.5, 3.0, 5.0]))
    torch.testing.assert_close(loaded.read_state({keys.STATE: torch.arange(5.0) + 2.0}), torch.tensor([1.0] * 5 + [0.0] * 3))
    assert loaded.hparams["action_statistics"]["mode"] == "mean_std"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"attention_mode": "self_attn"}, "attention_mode='self_attn' is not supported"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha=True is not supported"),
        ({"resize_imgs_with_padding": [32, 64]}, r"\[32, 64\] must be a square"),
    ],
)
def test_a_release_of_another_kind_is_refused(tmp_path: Path, said: dict[str, Any], message: str):
    """Weights that load into a network that reads them otherwise give other actions."""
    policy, tokenizer = make(SmolVLAPolicy), write_tokenizer(tmp_path)
    release = Path(write_release(tmp_path / "release", policy, in_release_layout(policy)))
    (release / "config.json").write_text(json.dumps(config_json(policy) | said))
    with pytest.raises(ValueError, match=message):
        SmolVLAPolicy(pretrained=str(release), tokenizer=tokenizer).build(SPEC)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"expert_width": 0.7}, "an expert of width 22, which must be even and a multiple of the 4"),
        ({"image_size": 40}, r"image_size=40 must be a multiple of patch_size \* scale_factor = 16"),
        ({"vision": {"hiden_size": 8}}, r"vision has fields \['hiden_size'\] that SmolVLMVisionConfig does not know"),
        ({"min_period": 5.0}, r"min_period=5\.0 must lie between 0 and max_period=4\.0"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SmolVLAPolicy(config=tiny_config(SmolVLAPolicy) | config).build(SPEC)
