"""Tiny SmolVLA and GR00T policies, and their weights under the names of the public releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.policies.vla_fakes import SPEC, randomize
from vla_async.envs import EnvSpec
from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.released import ReleasedFlowPolicy
from vla_async.policies.smolvla import SmolVLAPolicy

KINDS = (SmolVLAPolicy, Gr00tPolicy)
STATISTICS: dict[str, Any] = {"mode": "min_max", "min": [-1.0, -2.0, 0.0], "max": [1.0, 3.0, 0.5]}


def tiny_config(kind: type[ReleasedFlowPolicy]) -> dict[str, Any]:
    """Sizes for a network of some ten thousand parameters."""
    text = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared = {"chunk_size": 5, "max_state_dim": 8, "max_action_dim": 6}
    if kind is SmolVLAPolicy:
        vision, text = vision | {"image_size": 32, "patch_size": 8}, text | {"vocab_size": 300, "hidden_size": 32}
        sizes = {"vision": vision, "text": text}
        return sizes | shared | {"image_size": 32, "scale_factor": 2, "num_vlm_layers": 4, "expert_width": 0.75}
    sizes = {
        "vision": vision | {"image_size": 28, "patch_size": 14},
        "text": text | {"vocab_size": 300, "num_hidden_layers": 2},
        "dit_heads": 2,
        "dit_head_dim": 8,
        "dit_layers": 4,
        "context_heads": 3,
        "context_layers": 1,
        "hidden_size": 20,
        "future_tokens": 2,
    }
    return sizes | shared


def make(kind: type[ReleasedFlowPolicy], spec: EnvSpec = SPEC, seed: int = 0, **options: Any) -> Any:
    """A policy whose every weight matters."""
    policy = kind(**{"config": tiny_config(kind), "num_steps": 3} | options)
    policy.build(spec)
    randomize(policy, seed)
    return policy


def write_tokenizer(folder: Path) -> str:
    """A small tokenizer of words, in the file format of the tokenizers library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "push", "the", "cube", "stack", "open", "user", "<image 1>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def _smolvla_name(name: str) -> str:
    part, _, rest = name.partition(".")
    inside = {
        "vision": f"vlm.model.vision_model.{rest}",
        "connector": f"vlm.model.connector.{rest}",
        "embedding": f"vlm.model.text_model.embed_tokens.{rest}",
        "norm": f"vlm.model.text_model.norm.{rest}",
        "layers": f"vlm.model.text_model.layers.{rest.replace('block.', '')}",
        "expert_layers": f"lm_expert.layers.{rest.replace('block.', '')}",
        "expert_norm": f"lm_expert.norm.{rest}",
    }
    return f"model.vlm_with_expert.{inside[part]}" if part in inside else f"model.{name}"


def _block_name(rest: str) -> str:
    index, _, inside = rest.partition(".")
    for ours, theirs in (("to_out.", "to_out.0."), ("feed_forward.0.", "ff.net.0.proj."), ("feed_forward.2.", "ff.net.2.")):
        inside = inside.replace(ours, theirs)
    return f"transformer_blocks.{index}.{'attn1.' if inside.startswith('to_') else ''}{inside}"


def _gr00t_name(name: str) -> str:
    part, _, rest = name.partition(".")
    if part == "backbone":
        model, _, inside = rest.partition(".")
        eagle = {"vision_model": "vision_model.vision_model", "language_model": "language_model.model", "connector": "mlp1"}
        return f"backbone.eagle_model.{eagle[model]}.{inside}"
    if part == "dit":
        if rest.startswith("blocks."):
            return f"action_head.model.{_block_name(rest.removeprefix('blocks.'))}"
        return f"action_head.model.{rest.replace('time_encoder.', 'timestep_encoder.timestep_embedder.')}"
    if part == "context_blocks":
        return f"action_head.vl_self_attention.{_block_name(rest)}"
    if part == "context_norm":
        return f"action_head.vlln.{rest}"
    if part in ("state_encoder", "action_decoder", "action_encoder"):
        rest = rest.replace(".weight", ".W").replace(".bias", ".b")
        return f"action_head.{part}.{rest.replace('layer', 'W') if part == 'action_encoder' else rest}"
    return f"action_head.{name}"


def in_release_layout(policy: ReleasedFlowPolicy) -> dict[str, Tensor]:
    """The network's weights under the names of ``lerobot/smolvla_base`` or ``nvidia/GR00T-N1.5-3B``."""
    is_smol = isinstance(policy, SmolVLAPolicy)
    rename = _smolvla_name if is_smol else _gr00t_name
    released = {rename(name): tensor.clone() for name, tensor in policy.network.state_dict().items()}
    if is_smol:
        extra = {"model.vlm_with_expert.vlm.lm_head.weight": torch.ones(300, 32)}
        return released | extra | {"normalize_inputs.buffer_observation_state.mean": torch.zeros(5)}
    embedding = released["backbone.eagle_model.language_model.model.embed_tokens.weight"]
    pooling = "backbone.eagle_model.vision_model.vision_model.head.probe"
    tied = {"backbone.eagle_model.language_model.lm_head.weight": embedding.clone()}
    return released | tied | {pooling: torch.ones(1, 1, 16)}


def config_json(policy: ReleasedFlowPolicy) -> dict[str, Any]:
    """What a release says of its sizes."""
    sizes = policy.sizes
    if isinstance(policy, SmolVLAPolicy):
        return {
            "type": "smolvla",
            "chunk_size": sizes.chunk_size,
            "max_state_dim": sizes.max_state_dim,
            "max_action_dim": sizes.max_action_dim,
            "num_vlm_layers": sizes.num_vlm_layers,
            "expert_width_multiplier": sizes.expert_width,
            "self_attn_every_n_layers": sizes.self_attention_every,
            "resize_imgs_with_padding": [sizes.image_size, sizes.image_size],
            "attention_mode": "cross_attn",
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        }
    head = {
        "action_dim": sizes.max_action_dim,
        "action_horizon": sizes.chunk_size,
        "max_state_dim": sizes.max_state_dim,
        "hidden_size": sizes.hidden_size,
        "num_target_vision_tokens": sizes.future_tokens,
        "add_pos_embed": True,
        "diffusion_model_cfg": {
            "num_attention_heads": sizes.dit_heads,
            "attention_head_dim": sizes.dit_head_dim,
            "num_layers": sizes.dit_layers,
        },
        "vl_self_attention_cfg": {"num_attention_heads": sizes.context_heads, "num_layers": sizes.context_layers},
    }
    backbone = {"project_to_dim": None, "select_layer": 12}
    return {"model_type": "gr00t_n1_5", "action_head_cfg": head, "backbone_cfg": backbone}


def vlm_sizes(kind: type[ReleasedFlowPolicy]) -> dict[str, Any]:
    """The sizes that a release does not say, for they are those of a model that it is built on."""
    names = ("vision", "text", "scale_factor") if kind is SmolVLAPolicy else ("vision", "text")
    return {name: value for name, value in tiny_config(kind).items() if name in names}


def write_release(folder: Path, policy: ReleasedFlowPolicy, tensors: dict[str, Tensor]) -> str:
    """A folder as the hub has it."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(policy)))
    return str(folder)
