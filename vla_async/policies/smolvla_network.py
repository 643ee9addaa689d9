"""The network of SmolVLA: a small VLM that is read once per decision, and an action expert that looks into its layers.

Both are stacks of transformers' Llama layers. Layer i of the expert sees the keys and values of layer i of the VLM: in every
second layer it attends to them together with its own tokens, in the others to them alone, through projections of its own
(Shukor et al., "SmolVLA", arXiv 2506.01844, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig, SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

from vla_async.policies.recompute import call
from vla_async.policies.size_fields import check_fields

# HuggingFaceTB/SmolVLM2-500M-Video-Instruct, the VLM of lerobot/smolvla_base
_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 512,
    "patch_size": 16,
}  # fmt: skip
_TEXT = {
    "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64,
    "vocab_size": 49280, "rms_norm_eps": 1e-5,
}  # fmt: skip
_ROPE_THETA = 10_000.0  # not the VLM's own: the release rotates by this one in both stacks


@dataclass(frozen=True, kw_only=True)
class SmolVLASizes:
    """Sizes of the network; the defaults are those of lerobot/smolvla_base.

    Args:
        vision: fields of transformers' ``SmolVLMVisionConfig``, over those of SmolVLM2-500M.
        text: fields of transformers' ``LlamaConfig``, over those of SmolVLM2-500M.
        image_size: height and width of the images that the network is given.
        scale_factor: pixel shuffle of the features; an image becomes ``(image_size / patch_size / scale_factor)²`` tokens.
        num_vlm_layers: text layers of the VLM that are kept, and layers of the expert.
        expert_width: width of the expert, as a share of the VLM's.
        self_attention_every: every how many layers of the expert attend to its own tokens too, from the first one on.
        chunk_size: H'.
        max_state_dim: the state is padded to this.
        max_action_dim: A'.
        min_period: shortest wave of the time embedding.
        max_period: longest wave of the time embedding.

    Raises:
        ValueError: names the field and the fix.
    """

    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    image_size: int = 512
    scale_factor: int = 4
    num_vlm_layers: int = 16
    expert_width: float = 0.75
    self_attention_every: int = 2
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0

    def __post_init__(self) -> None:
        integers = (
            "scale_factor", "num_vlm_layers", "self_attention_every", "chunk_size", "max_state_dim", "max_action_dim",
        )  # fmt: skip
        for name in integers:
            if getattr(self, name) < 1:
                raise ValueError(f"model.config: {name}={getattr(self, name)} must be at least 1")
        check_fields("vision", self.vision, SmolVLMVisionConfig)
        check_fields("text", self.text, LlamaConfig)
        if not 0.0 < self.min_period < self.max_period:
            raise ValueError(
                f"model.config: min_period={self.min_period} must lie between 0 and max_period={self.max_period}"
            )
        cell, largest = self.vision_config["patch_size"] * self.scale_factor, self.vision_config["image_size"]
        if self.image_size < cell or self.image_size % cell or self.image_size > largest:
            raise ValueError(
                f"model.config: image_size={self.image_size} must be a multiple of patch_size * scale_factor = {cell}, "
                f"up to vision.image_size={largest}"
            )
        heads = self.text_config["num_attention_heads"]
        if self.width < 2 or self.width % 2 or self.width % heads:
            raise ValueError(
                f"model.config: expert_width={self.expert_width} gives an expert of width {self.width}, which must be even "
                f"and a multiple of the {heads} attention heads"
            )

    @property
    def width(self) -> int:
        """Features of the expert's tokens."""
        return int(self.text_config["hidden_size"] * self.expert_width)

    @property
    def text_config(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": _ROPE_THETA}
        return {**_TEXT, **self.text, "num_hidden_layers": self.num_vlm_layers, "rope_parameters": rope}

    @property
    def vision_config(self) -> dict[str, Any]:
        return {**_VISION, **self.vision}

    @property
    def expert_config(self) -> dict[str, Any]:
        hidden = 4 * int(2 * self.width / 3)
        return {**self.text_config, "hidden_size": self.width, "intermediate_size": 256 * math.ceil(hidden / 256)}


class KeysValues(NamedTuple):
    """Keys, rotated by their positions, and values of one layer, each ``[B, heads, T, head_dim]``."""

    keys: Tensor
    values: Tensor


class SmolVLACache(NamedTuple):
    """What the expert needs of a prefix: the keys and values of each VLM layer, and the mask bool ``[B, N]``."""

    layers: list[KeysValues]
    mask: Tensor


Rotary = tuple[Tensor, Tensor]


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (part.unsqueeze(1) for part in rotary)
    rotated: Tensor = x * cos + rotate_half(x) * sin
    return rotated


class Layer(nn.Module):
    """A Llama layer that hands out its keys and values, and can look into another stack's.

    Args:
        config: of the layer.
        index: of the layer.
        cross_dim: features of the other stack's keys, for a layer that attends to them alone; None for self-attention.
    """

    def __init__(self, config: LlamaConfig, index: int, cross_dim: int | None = None) -> None:
        super().__init__()
        self.block = LlamaDecoderLayer(config, index)
        self.is_cross = cross_dim is not None
        if cross_dim is not None:
            attention = self.block.self_attn
            attention.k_proj, attention.v_proj = (
                nn.Linear(cross_dim, projection.out_features, bias=projection.bias is not None)
                for projection in (attention.k_proj, attention.v_proj)
            )

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.block.self_attn.head_dim)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, other: KeysValues | None = None) -> tuple[Tensor, KeysValues]:
        """One layer.

        Args:
            x: ``[B, T, D]``.
            rotary: cosines and sines of the positions of ``x``, each ``[B, T, head_dim]``.
            mask: bool ``[B, 1, T, S]``, true where a token may look; S counts the other stack's tokens first, if any.
            other: the other stack's keys and values.

        Returns:
            ``[B, T, D]``, and the layer's own keys and values.
        """
        attention, normed = self.block.self_attn, self.block.input_layernorm(x)
        query = _rotate(self._heads(attention.q_proj(normed)), rotary)
        if self.is_cross:
            if other is None:
                raise ValueError("a cross-attention layer needs the keys and values of the other stack")
            source = KeysValues(*(part.transpose(1, 2).flatten(2) for part in other))
            own = KeysValues(self._heads(attention.k_proj(source.keys)), self._heads(attention.v_proj(source.values)))
            seen = own
        else:
            own = KeysValues(_rotate(self._heads(attention.k_proj(normed)), rotary), self._heads(attention.v_proj(normed)))
            seen = own if other is None else KeysValues(*(torch.cat(pair, dim=2) for pair in zip(other, own, strict=True)))
        attended = functional.scaled_dot_product_attention(query, *seen, attn_mask=mask, enable_gqa=True)
        x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.block.mlp(self.block.post_attention_layernorm(x))
        return hidden, own


class SmolVLANetwork(nn.Module):
    """Images, instruction and state in; the velocity of a noisy chunk out.

    Args:
        sizes: of all parts.
        recompute: save memory by gradient checkpointing, while training.
    """

    def __init__(self, sizes: SmolVLASizes, recompute: bool = False) -> None:
        super().__init__()
        self.sizes, self.recompute = sizes, recompute
        vision = SmolVLMVisionConfig(**sizes.vision_config)
        vlm = SmolVLMConfig(
            vision_config=vision,
            text_config={"model_type": "llama", **sizes.text_config},
            scale_factor=sizes.scale_factor,
        )
        text, expert = LlamaConfig(**sizes.text_config), LlamaConfig(**sizes.expert_config)
        self.vision = SmolVLMVisionTransformer(vision)
        if recompute:
            self.vision.activation_checkpointing_enable({"use_reentrant": False})
        self.connector = SmolVLMConnector(vlm)
        self.embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList(Layer(text, index) for index in range(sizes.num_vlm_layers))
        self.norm = LlamaRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        cross_dim = sizes.text_config["num_key_value_heads"] * sizes.text_config["head_dim"]
        self.expert_layers = nn.ModuleList(
            Layer(expert, index, None if index % sizes.self_attention_every == 0 else cross_dim)
            for index in range(sizes.num_vlm_layers)
        )
        self.expert_norm = LlamaRMSNorm(sizes.width, eps=expert.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(text)
        self.state_proj = nn.Linear(sizes.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(sizes.max_action_dim, sizes.width)
        self.action_time_mlp_in = nn.Linear(2 * sizes.width, sizes.width)
        self.action_time_mlp_out = nn.Linear(sizes.width, sizes.width)
        self.action_out_proj = nn.Linear(sizes.width, sizes.max_action_dim)

    def _embed(
        self, images: Sequence[Tensor], image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = self.embedding.weight.dtype
        pixels = torch.stack(list(images), dim=1)
        patches = self.vision(pixel_values=pixels.flatten(0, 1).to(dtype)).last_hidden_state
        image = self.connector(patches).unflatten(0, pixels.shape[:2])
        seen = image_mask.unsqueeze(-1).expand(image.shape[:3]).flatten(1)
        scale = math.sqrt(self.embedding.embedding_dim)
        parts = [image.flatten(1, 2) * scale, self.embedding(tokens) * scale, self.state_proj(state.to(dtype)).unsqueeze(1)]
        return torch.cat(parts, dim=1), torch.cat([seen, token_mask, torch.ones_like(seen[:, :1])], dim=1)

    def prefix(
        self, images: Sequence[Tensor], image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, SmolVLACache]:
        """Read an observation.

        Args:
            images: per camera slot ``[B, 3, size, size]`` in [-1, 1].
            image_mask: bool ``[B, slots]``, false where a slot has no camera.
            tokens: int64 ``[B, L]``.
            token_mask: bool ``[B, L]``, false at padding.
            state: ``[B, max_state_dim]``.

        Returns:
            Features ``[B, N, D]`` of the images, the instruction and, last, the state; and what :meth:`velocity` needs.
        """
        x, valid = self._embed(images, image_mask, tokens, token_mask, state)
        mask = valid[:, None, None, :].expand(-1, 1, x.shape[1], -1).clone()
        mask[:, :, :-1, -1] = False  # images and instruction do not look at the state
        rotary = self.rotary(x, (valid.cumsum(1) - 1).clamp(min=0))
        layers: list[KeysValues] = []
        for layer in self.layers:
            x, own = call(layer, x, rotary, mask, recompute=self.recompute)
            layers.append(own)
        return self.norm(x), SmolVLACache(layers, valid)

    def velocity(self, cache: SmolVLACache, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity of noisy chunks ``[B, H', A']`` at times ``[B]``, float32, and the features it is read from."""
        dtype = self.action_in_proj.weight.dtype
        action = self.action_in_proj(x_t.to(dtype))
        time = _waves(t, self.sizes).to(dtype).unsqueeze(1).expand_as(action)
        x = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(torch.cat([action, time], dim=-1))))
        steps = torch.arange(x.shape[1], device=x.device)
        positions = cache.mask.sum(1, keepdim=True) + steps
        rotary, cross_rotary = self.rotary(x, positions), self.rotary(x, steps.expand_as(positions))
        cross_mask = cache.mask[:, None, None, :].expand(-1, 1, len(steps), -1)
        # an action sees the prefix, itself and the actions before it
        causal = (steps <= steps.unsqueeze(1)).expand(len(x), 1, -1, -1)
        self_mask = torch.cat([cross_mask, causal], dim=-1)
        for layer, other in zip(self.expert_layers, cache.layers, strict=True):
            where = (cross_rotary, cross_mask) if layer.is_cross else (rotary, self_mask)
            x, _ = call(layer, x, *where, other, recompute=self.recompute)
        features: Tensor = self.expert_norm(x)
        return self.action_out_proj(features).float(), features


def _waves(t: Tensor, sizes: SmolVLASizes) -> Tensor:
    """Sines, then cosines, of the time ``[B]`` at periods from ``min_period`` to ``max_period``: ``[B, width]``."""
    share = torch.linspace(0.0, 1.0, sizes.width // 2, dtype=torch.float64, device=t.device)
    period = sizes.min_period * (sizes.max_period / sizes.min_period) ** share
    angles = t.to(torch.float64).unsqueeze(-1) * (2.0 * math.pi / period)
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
