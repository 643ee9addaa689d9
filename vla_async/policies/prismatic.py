"""OpenVLA-OFT's network (arXiv 2502.19645) on transformers' blocks, and the names its releases give to the weights.

Two vision transformers, DINOv2 with registers and SigLIP, see each image; their patch features side by side are projected
into a Llama, which makes a whole chunk of action tokens in one pass from empty embeddings in the places of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_async.policies.images import resize, standardize
from vla_async.policies.size_fields import check_fields

Attention = Literal["bidirectional", "causal"]

# of the released image processor, where ImageNet's were rounded to bfloat16
_DINO_MEAN, _DINO_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
_SIGLIP_MEAN = _SIGLIP_STD = (0.5, 0.5, 0.5)
_STOP = 2  # the token after the actions

RELEASE: dict[str, dict[str, Any]] = {
    "dinov2": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 224},
    "siglip": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
        "hidden_act": "gelu",
    },
    "llama": {"vocab_size": 32064},
    "actions": {"num_bins": 256, "unused_tokens": 64},
}
"""The sizes of openvla-7b: settings of transformers' Dinov2WithRegistersConfig, SiglipVisionConfig and LlamaConfig, and

``actions``: the bins are the last ``num_bins`` tokens before the last ``unused_tokens`` of the vocabulary.
"""


def merge_sizes(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The release's sizes with some replaced.

    Raises:
        ValueError: if there is no such part, or no such field of ``actions``.
    """
    unknown = sorted(set(overrides) - set(RELEASE))
    if unknown:
        raise ValueError(f"model.config has unknown parts {unknown}; there are {sorted(RELEASE)}")
    unknown = sorted(set(overrides.get("actions", {})) - set(RELEASE["actions"]))
    if unknown:
        raise ValueError(f"model.config: actions has unknown fields {unknown}; there are {sorted(RELEASE['actions'])}")
    return {part: RELEASE[part] | dict(overrides.get(part, {})) for part in RELEASE}


@dataclass(frozen=True)
class PrismaticShape:
    """What the network is built for.

    Attributes:
        num_actions: action tokens of a decision, H * A.
        state_dim: length of the state that becomes a token of its own, or None without one.
        attention: whether all tokens see all others, as in the release, or only earlier ones, as in fine-tunings of it
            with the usual transformers.
    """

    num_actions: int
    state_dim: int | None = None
    attention: Attention = "bidirectional"


class ActionOutputs(NamedTuple):
    """What the network says of a batch of decisions.

    Attributes:
        logits: float32 ``[B, H * A, bins]``, from the lowest action bin to the highest.
        features: ``[B, H * A, D]``, the hidden states that the logits are read from.
    """

    logits: Tensor
    features: Tensor


class FusedVision(nn.Module):
    """DINOv2 and SigLIP side by side, each up to its last layer but one.

    Args:
        sizes: of both, see :data:`RELEASE`; the layers of the release, of which one less is built.
    """

    def __init__(self, sizes: Mapping[str, Mapping[str, Any]]) -> None:
        from transformers import (
            Dinov2WithRegistersConfig,
            Dinov2WithRegistersModel,
            SiglipVisionConfig,
            SiglipVisionModel,
        )

        super().__init__()
        check_fields("dinov2", sizes["dinov2"], Dinov2WithRegistersConfig)
        check_fields("siglip", sizes["siglip"], SiglipVisionConfig)
        cut = {
            part: {**sizes[part], "num_hidden_layers": sizes[part]["num_hidden_layers"] - 1} for part in ("dinov2", "siglip")
        }
        self.dinov2 = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**cut["dinov2"]))
        self.siglip = SiglipVisionModel(SiglipVisionConfig(**cut["siglip"], vision_use_head=False))
        # no patch is ever masked, and features are read before the last norm
        self.dinov2.embeddings.register_parameter("mask_token", None)
        self.dinov2.register_module("layernorm", nn.Identity())
        self.siglip.register_module("post_layernorm", nn.Identity())
        self.image_size = int(sizes["dinov2"]["image_size"])
        self.skipped = 1 + self.dinov2.config.num_register_tokens
        self.dim = self.dinov2.config.hidden_size + self.siglip.config.hidden_size
        patches = {part: (sizes[part]["image_size"] // sizes[part]["patch_size"]) ** 2 for part in cut}
        if len(set(patches.values())) > 1 or sizes["siglip"]["image_size"] != self.image_size:
            raise ValueError(
                f"model.config: dinov2 and siglip must cut images of one size alike, not into {patches} patches"
            )
        self.num_patches = patches["dinov2"]

    def forward(self, images: Tensor) -> Tensor:
        """Float ``[B, 3, H, W]`` in [-1, 1] of any size to ``[B, patches, dim]``."""
        images = resize(images, self.image_size, self.image_size, "bicubic")
        dtype = next(self.parameters()).dtype
        dino = self.dinov2(standardize(images, _DINO_MEAN, _DINO_STD).to(dtype)).last_hidden_state[:, self.skipped :]
        siglip = self.siglip(standardize(images, _SIGLIP_MEAN, _SIGLIP_STD).to(dtype)).last_hidden_state
        return torch.cat([dino, siglip], dim=-1)


class Projector(nn.Module):
    """Patch features to embeddings of the Llama."""

    def __init__(self, vision_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, dim)
        self.fc3 = nn.Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(features)))))
        return projected


class StateProjector(nn.Module):
    """The normalised state to one embedding."""

    def __init__(self, state_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, state: Tensor) -> Tensor:
        projected: Tensor = self.fc2(functional.gelu(self.fc1(state.to(self.fc1.weight.dtype))))
        return projected.unsqueeze(1)


class PrismaticNetwork(nn.Module):
    """From images, state and prompt to the logits of all action tokens, in one pass.

    Args:
        sizes: by :func:`merge_sizes`.
        shape: what it is built for.
    """

    def __init__(self, sizes: Mapping[str, Mapping[str, Any]], shape: PrismaticShape) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        check_fields("llama", sizes["llama"], LlamaConfig)
        self.shape = shape
        # an explicit mask is given, which not all implementations of attention take
        config = LlamaConfig(**{**sizes["llama"], "attn_implementation": "sdpa"})
        self.vision = FusedVision(sizes)
        self.projector = Projector(self.vision.dim, config.hidden_size)
        self.language = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)
        self.state_projector = None if shape.state_dim is None else StateProjector(shape.state_dim, config.hidden_size)
        self.num_bins = int(sizes["actions"]["num_bins"])
        self.last_bin = config.vocab_size - int(sizes["actions"]["unused_tokens"])
        if not 2 <= self.num_bins <= self.last_bin:
            raise ValueError(f"model.config: {self.num_bins} action bins do not fit into {self.last_bin} used tokens")
        self.dim: int = config.hidden_size

    def _mask(self, valid: Tensor) -> Tensor:
        """Which token sees which: bool ``[B, 1, tokens, tokens]`` from bool ``[B, tokens]``."""
        mask = valid[:, None, None, :].expand(-1, 1, valid.shape[1], -1)
        if self.shape.attention == "causal":
            mask = mask & torch.ones_like(mask[0, 0]).tril()
        return mask

    def forward(
        self, images: list[Tensor], tokens: Tensor, token_mask: Tensor, state: Tensor | None = None
    ) -> ActionOutputs:
        """One pass.

        Args:
            images: one float tensor ``[B, 3, H, W]`` in [-1, 1] per camera.
            tokens: int64 ``[B, L]``, the prompt, its beginning first, padded on the right.
            token_mask: bool ``[B, L]``, true where a token is no padding.
            state: normalised ``[B, state_dim]``, if the network was built for one.
        """
        words = self.language.embed_tokens(tokens)
        seen = [self.projector(self.vision(image)) for image in images]
        if self.state_projector is not None:
            assert state is not None
            seen.append(self.state_projector(state))
        rows, count = len(tokens), self.shape.num_actions
        stop = self.language.embed_tokens(tokens.new_full((rows, 1), _STOP))
        embeddings = torch.cat([words[:, :1], *seen, words[:, 1:], words.new_zeros(rows, count, self.dim), stop], dim=1)
        shown = sum(part.shape[1] for part in seen)
        always = token_mask.new_ones(rows, 1)
        valid = torch.cat(
            [token_mask[:, :1], always.expand(-1, shown), token_mask[:, 1:], always.expand(-1, count + 1)], dim=1
        )
        # the padding stands before the actions, but takes no position
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.language(
            inputs_embeds=embeddings, attention_mask=self._mask(valid), position_ids=positions, use_cache=False
        ).last_hidden_state
        features = self._before_actions(hidden, shown, token_mask)
        weight = self.lm_head.weight[self.last_bin - self.num_bins : self.last_bin]
        # the first token before the unused ones is the lowest bin
        logits = functional.linear(features, weight).float().flip(-1)
        return ActionOutputs(logits, features)

    def _before_actions(self, hidden: Tensor, shown: int, token_mask: Tensor) -> Tensor:
        """The hidden state of the token before each action token, which predicts it: ``[B, H * A, D]``."""
        first = token_mask.shape[1] + shown  # place of the first action token
        last_word = shown + token_mask.sum(1) - 1
        start = hidden[torch.arange(len(hidden), device=hidden.device), last_word].unsqueeze(1)
        return torch.cat([start, hidden[:, first : first + self.shape.num_actions - 1]], dim=1)


KEY_MAP: tuple[tuple[str, str], ...] = (
    # vision: the releases have timm's names; the last layer, the last norms and SigLIP's pooling are never read
    (r"^vision_backbone\.featurizer\.", "vision.dinov2."),
    (r"^vision_backbone\.fused_featurizer\.", "vision.siglip."),
    (r"^vision\.(dinov2|siglip)\.norm\..*$", ""),
    (r"^vision\.siglip\.attn_pool\..*$", ""),
    (r"^vision\.dinov2\.(cls_token|position_embeddings)$", r"vision.dinov2.embeddings.\1"),
    (r"^vision\.dinov2\.reg_token$", "vision.dinov2.embeddings.register_tokens"),
    (r"^vision\.dinov2\.patch_embed\.proj\.", "vision.dinov2.embeddings.patch_embeddings.projection."),
    (r"^vision\.dinov2\.blocks\.(\d+)\.attn\.proj\.", r"vision.dinov2.encoder.layer.\1.attention.o_proj."),
    (r"^vision\.dinov2\.blocks\.(\d+)\.attn\.", r"vision.dinov2.encoder.layer.\1.attention."),
    (
        r"^vision\.dinov2\.blocks\.(\d+)\.ls(\d)\.(gamma|scale_factor)$",
        r"vision.dinov2.encoder.layer.\1.layer_scale\2.lambda1",
    ),
    (r"^vision\.dinov2\.blocks\.", "vision.dinov2.encoder.layer."),
    (r"^vision\.siglip\.patch_embed\.proj\.", "vision.siglip.embeddings.patch_embedding."),
    (r"^vision\.siglip\.position_embedding\.weight$", "vision.siglip.embeddings.position_embedding.weight"),
    (r"^vision\.siglip\.blocks\.(\d+)\.attn\.proj\.", r"vision.siglip.encoder.layers.\1.self_attn.out_proj."),
    (r"^vision\.siglip\.blocks\.(\d+)\.attn\.", r"vision.siglip.encoder.layers.\1.self_attn."),
    (r"^vision\.siglip\.blocks\.(\d+)\.norm(\d)\.", r"vision.siglip.encoder.layers.\1.layer_norm\2."),
    (r"^vision\.siglip\.blocks\.", "vision.siglip.encoder.layers."),
    (r"^language_model\.model\.", "language."),
    (r"^language_model\.lm_head\.", "lm_head."),
    # OFT keeps its state projector in a file of its own
    (r"^(module\.)?proprio_projector\.", "state_projector."),
)
"""Names of a release, after :func:`unfuse`, to names in :class:`PrismaticNetwork`."""


def unfuse(tensors: Mapping[str, Tensor], sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """A release's tensors as transformers' blocks have them: queries, keys and values apart, position embeddings reshaped.

    The last layer of either vision transformer is left out, since no one reads it.
    """
    last = {
        "vision_backbone.featurizer.": sizes["dinov2"]["num_hidden_layers"] - 1,
        "vision_backbone.fused_featurizer.": sizes["siglip"]["num_hidden_layers"] - 1,
    }
    unread = tuple(f"{prefix}blocks.{index}." for prefix, index in last.items())
    return dict(pair for name in tensors if not name.startswith(unread) for pair in _unfused(name, tensors[name]))


def _unfused(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if ".attn.qkv." in name and name.startswith("vision_backbone."):
        for part, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
            yield name.replace(".qkv.", f".{part}."), rows
    elif name == "vision_backbone.fused_featurizer.pos_embed":
        yield "vision_backbone.fused_featurizer.position_embedding.weight", tensor[0]
    elif name == "vision_backbone.featurizer.pos_embed":
        # timm gives the class token no position; transformers has a row for it
        yield "vision_backbone.featurizer.position_embeddings", functional.pad(tensor, (0, 0, 1, 0))
    else:
        yield name, tensor
