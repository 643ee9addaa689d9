"""``layout_of``: how the release of each policy looks, with the sizes and names of the policy at hand."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch

from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.layouts import GR00T_NAMES, OPENVLA_NAMES, PI05_NAMES, SMOLVLA_NAMES, Layout
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.pi0 import Pi0Policy
from vla_async.policies.pi05 import Pi05Policy
from vla_async.policies.prismatic import KEY_MAP as OPENVLA_KEY_MAP
from vla_async.policies.processing import Normalizer
from vla_async.policies.released import ReleasedFlowPolicy
from vla_async.policies.smolvla import SmolVLAPolicy

_GR00T_BLOCKS = {"dropout": 0.2, "final_dropout": True, "positional_embeddings": None}  # as in the release


@singledispatch
def layout_of(policy: object) -> Layout:
    """The layout of a built policy's release.

    Raises:
        ValueError: if there is none.
    """
    name = type(policy).__name__
    raise ValueError(
        f"{name} has no public release whose layout it could be written in; its checkpoints load with "
        f"{name}.load_from_checkpoint"
    )


def _key_map(policy: ReleasedFlowPolicy) -> list[tuple[str, str]]:
    return policy.key_map(["language_model.model.embed_tokens.weight"])


@layout_of.register
def _of_pi0(policy: Pi0Policy) -> Layout:
    """Transformers' own, for ``PI0ForConditionalGeneration.from_pretrained``."""
    config = policy.sizes.make_config()
    config.architectures = ["PI0ForConditionalGeneration"]
    config.num_inference_steps = policy.hparams["num_steps"]
    return Layout((), _key_map(policy), config.to_dict())


def _lerobot_config(policy: ReleasedFlowPolicy, kind: str) -> dict[str, Any]:
    """What LeRobot's configurations of all policies hold. Whatever normalises is an offset and a scale."""
    spec, sizes = policy.env_spec, policy.sizes
    assert spec is not None
    cameras = {f"observation.images.{name}": spec.images[name] for name in policy.cameras.sources if name is not None}
    inputs: dict[str, Any] = {name: {"type": "VISUAL", "shape": list(shape)} for name, shape in cameras.items()}
    inputs["observation.state"] = {"type": "STATE", "shape": [spec.state_dim]}
    return {
        "type": kind,
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [spec.action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": sizes.chunk_size,
        "n_action_steps": spec.chunk_size,
        "max_state_dim": sizes.max_state_dim,
        "max_action_dim": sizes.max_action_dim,
        "min_period": sizes.min_period,
        "max_period": sizes.max_period,
        "tokenizer_max_length": policy.prompt.max_length,
    }


@layout_of.register
def _of_pi05(policy: Pi05Policy) -> Layout:
    """That of ``lerobot/pi05_base``, with the expert's output layer, which is loaded there but never read."""
    sizes = policy.sizes
    size = sizes.vision_config["image_size"]
    config = _lerobot_config(policy, "pi05") | {
        "num_inference_steps": policy.hparams["num_steps"],
        "image_resolution": [size, size],
        "dtype": policy.hparams["dtype"],
    }
    # LeRobot 0.4 pads the state in the prompt to this, 0.6 leaves it as long as it is
    state_in_prompt = ("pi05_prepare_state_tokenizer_processor_step", {"max_state_dim": policy.prompt_state_dim})
    unread = (sizes.text_config["vocab_size"], sizes.expert_config["hidden_size"])
    zeros = {"paligemma_with_expert.gemma_expert.lm_head.weight": unread}
    return Layout(PI05_NAMES, _key_map(policy), config, zeros, [state_in_prompt])


@layout_of.register
def _of_smolvla(policy: SmolVLAPolicy) -> Layout:
    """That of ``lerobot/smolvla_base``."""
    sizes = policy.sizes
    config = _lerobot_config(policy, "smolvla") | {
        "num_vlm_layers": sizes.num_vlm_layers,
        "expert_width_multiplier": sizes.expert_width,
        "self_attn_every_n_layers": sizes.self_attention_every,
        "resize_imgs_with_padding": [sizes.image_size, sizes.image_size],
        "attention_mode": "cross_attn",
        "num_steps": policy.hparams["num_steps"],
    }
    return Layout(SMOLVLA_NAMES, _key_map(policy), config, prompt_steps=[("smolvla_new_line_processor", {})])


@layout_of.register
def _of_gr00t(policy: Gr00tPolicy) -> Layout:
    """That of ``nvidia/GR00T-N1.5-3B``."""
    sizes = policy.sizes
    head = {
        "action_dim": sizes.max_action_dim,
        "action_horizon": sizes.chunk_size,
        "max_state_dim": sizes.max_state_dim,
        "max_num_embodiments": sizes.max_embodiments,
        "hidden_size": sizes.hidden_size,
        "backbone_embedding_dim": sizes.context_dim,
        "input_embedding_dim": sizes.width,
        "num_target_vision_tokens": sizes.future_tokens,
        "num_timestep_buckets": sizes.time_buckets,
        "num_inference_timesteps": policy.hparams["num_steps"],
        "add_pos_embed": True,
        "use_vlln": True,
        "diffusion_model_cfg": {
            "num_attention_heads": sizes.dit_heads,
            "attention_head_dim": sizes.dit_head_dim,
            "num_layers": sizes.dit_layers,
            "output_dim": sizes.hidden_size,
            "cross_attention_dim": sizes.context_dim,
            "interleave_self_attention": True,
            "norm_type": "ada_norm",
            **_GR00T_BLOCKS,
        },
        "vl_self_attention_cfg": {
            "num_attention_heads": sizes.context_heads,
            "attention_head_dim": sizes.context_dim // sizes.context_heads,
            "num_layers": sizes.context_layers,
            **_GR00T_BLOCKS,
        },
    }
    config = {
        "model_type": "gr00t_n1_5",
        "architectures": ["GR00T_N1_5"],
        "action_dim": sizes.max_action_dim,
        "action_horizon": sizes.chunk_size,
        "compute_dtype": policy.hparams["dtype"],
        "action_head_cfg": head,
        "backbone_cfg": {"project_to_dim": None, "select_layer": sizes.text_config["num_hidden_layers"]},
    }
    return Layout(GR00T_NAMES, _key_map(policy), config)


@layout_of.register
def _of_openvla(policy: OpenVLAOFTPolicy) -> Layout:
    """That of ``openvla/openvla-7b``, but for the vision transformers' last layers, which are never read."""
    statistics = {"action": _bounds(policy.bins.normalizer)}
    if policy.hparams["use_state"]:
        statistics["proprio"] = _bounds(policy.state_normalizer)
    config = {
        "model_type": "openvla",
        "n_action_bins": policy.network.num_bins,
        "norm_stats": {"vla_async": statistics},
    }
    return Layout(OPENVLA_NAMES, OPENVLA_KEY_MAP, config)


def _bounds(normalizer: Normalizer) -> dict[str, Any]:
    """What normalises, as percentiles; elements that stay as they are have -1 and 1."""
    low, high = normalizer.offset - normalizer.scale, normalizer.offset + normalizer.scale
    return {"q01": low.tolist(), "q99": high.tolist(), "mask": torch.ones_like(low, dtype=torch.bool).tolist()}
