"""The layouts of the public releases, to write weights in: the inverse of what loading renames.

Each list of pairs is applied in order to a name in our network (``re.sub``), and gives the name in the release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Pairs = Sequence[tuple[str, str]]

PI05_NAMES: Pairs = (
    (r"^vlm\.language_model\.embed_tokens\.", "paligemma_with_expert.paligemma.lm_head."),
    (r"^vlm\.vision_tower\.", "vlm.vision_tower.vision_model."),
    (r"^vlm\.", "paligemma_with_expert.paligemma.model."),
    (r"^expert\.", "paligemma_with_expert.gemma_expert.model."),
)
"""Of ``lerobot/pi05_base``."""

SMOLVLA_NAMES: Pairs = (
    (r"^vision\.", "vlm.model.vision_model."),
    (r"^connector\.", "vlm.model.connector."),
    (r"^embedding\.", "vlm.model.text_model.embed_tokens."),
    (r"^norm\.", "vlm.model.text_model.norm."),
    (r"^layers\.(\d+)\.block\.", r"vlm.model.text_model.layers.\1."),
    (r"^expert_layers\.(\d+)\.block\.", r"lm_expert.layers.\1."),
    (r"^expert_norm\.", "lm_expert.norm."),
    (r"^(vlm|lm_expert)\.", r"vlm_with_expert.\1."),
    (r"^", "model."),
)
"""Of ``lerobot/smolvla_base``."""

_BLOCK = r"^((?:dit\.|context_)blocks\.\d+\.)"
GR00T_NAMES: Pairs = (
    (r"^backbone\.vision_model\.", "backbone.eagle_model.vision_model.vision_model."),
    (r"^backbone\.language_model\.", "backbone.eagle_model.language_model.model."),
    (r"^backbone\.connector\.", "backbone.eagle_model.mlp1."),
    (rf"{_BLOCK}to_out\.", r"\1attn1.to_out.0."),
    (rf"{_BLOCK}(to_[qkv]\.)", r"\1attn1.\2"),
    (rf"{_BLOCK}feed_forward\.0\.", r"\1ff.net.0.proj."),
    (rf"{_BLOCK}feed_forward\.2\.", r"\1ff.net.2."),
    (r"^context_norm\.", "vlln."),
    (r"^context_blocks\.", "vl_self_attention.transformer_blocks."),
    (r"^dit\.blocks\.", "model.transformer_blocks."),
    (r"^dit\.time_encoder\.", "model.timestep_encoder.timestep_embedder."),
    (r"^dit\.", "model."),
    (r"^((?:state_encoder|action_encoder|action_decoder)\.layer\d\.)weight$", r"\1W"),
    (r"^((?:state_encoder|action_encoder|action_decoder)\.layer\d\.)bias$", r"\1b"),
    (r"^action_encoder\.layer(\d)\.", r"action_encoder.W\1."),
    (r"^(?!backbone\.)", "action_head."),
)
"""Of ``nvidia/GR00T-N1.5-3B``."""

OPENVLA_NAMES: Pairs = (
    (r"^vision\.dinov2\.embeddings\.(cls_token|position_embeddings)$", r"vision.dinov2.\1"),
    (r"^vision\.dinov2\.embeddings\.register_tokens$", "vision.dinov2.reg_token"),
    (r"^vision\.dinov2\.embeddings\.patch_embeddings\.projection\.", "vision.dinov2.patch_embed.proj."),
    (r"^vision\.dinov2\.encoder\.layer\.(\d+)\.attention\.o_proj\.", r"vision.dinov2.blocks.\1.attn.proj."),
    (r"^vision\.dinov2\.encoder\.layer\.(\d+)\.attention\.", r"vision.dinov2.blocks.\1.attn."),
    (r"^vision\.dinov2\.encoder\.layer\.(\d+)\.layer_scale(\d)\.lambda1$", r"vision.dinov2.blocks.\1.ls\2.scale_factor"),
    (r"^vision\.dinov2\.encoder\.layer\.", "vision.dinov2.blocks."),
    (r"^vision\.siglip\.embeddings\.patch_embedding\.", "vision.siglip.patch_embed.proj."),
    (r"^vision\.siglip\.embeddings\.position_embedding\.weight$", "vision.siglip.position_embedding.weight"),
    (r"^vision\.siglip\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"vision.siglip.blocks.\1.attn.proj."),
    (r"^vision\.siglip\.encoder\.layers\.(\d+)\.self_attn\.", r"vision.siglip.blocks.\1.attn."),
    (r"^vision\.siglip\.encoder\.layers\.(\d+)\.layer_norm(\d)\.", r"vision.siglip.blocks.\1.norm\2."),
    (r"^vision\.siglip\.encoder\.layers\.", "vision.siglip.blocks."),
    (r"^vision\.dinov2\.", "vision_backbone.featurizer."),
    (r"^vision\.siglip\.", "vision_backbone.fused_featurizer."),
    (r"^language\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^state_projector\.", "proprio_projector."),
)
"""Of ``openvla/openvla-7b``, but for what :func:`fuse` still has to join."""


@dataclass(frozen=True)
class Layout:
    """How a policy's release looks on disk.

    Attributes:
        names: from the network's names to the release's.
        key_map: back, as for :func:`~vla_async.policies.checkpoints.load_mapped`.
        config: content of ``config.json``.
        zeros: shapes of tensors that the release has and the network does not, for nothing reads them.
        prompt_steps: the steps of LeRobot's processor that make an instruction the prompt, by name, with their options.
    """

    names: Pairs
    key_map: Pairs
    config: Mapping[str, Any]
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prompt_steps: Sequence[tuple[str, Mapping[str, Any]]] = ()

    @property
    def is_lerobots(self) -> bool:
        """Whether LeRobot loads it: with its processors beside it, and all weights in one file."""
        return "normalization_mapping" in self.config

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's tensors under the release's names.

        Raises:
            RuntimeError: if a name would not come back as what it was.
        """
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            there = apply(self.names, name)
            if apply(self.key_map, there) != name or there in renamed:
                raise RuntimeError(f"{name} would be written as {there}, which is read as {apply(self.key_map, there)}")
            renamed[there] = tensor
        dtype = next(iter(tensors.values())).dtype
        return renamed | {name: torch.zeros(shape, dtype=dtype) for name, shape in self.zeros.items()}


def apply(pairs: Pairs, name: str) -> str:
    """A name after all replacements."""
    for pattern, replacement in pairs:
        name = re.sub(pattern, replacement, name)
    return name


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """OpenVLA's tensors as its releases have them: the inverse of :func:`~vla_async.policies.prismatic.unfuse`.

    The class token's position, which the release does not have, is added to the class token.
    """
    fused = dict(_fused(tensors))
    dino = "vision_backbone.featurizer."
    positions = fused.pop(f"{dino}position_embeddings")
    fused[f"{dino}cls_token"] = fused[f"{dino}cls_token"] + positions[:, :1]
    fused[f"{dino}pos_embed"] = positions[:, 1:].clone()
    return fused


def _fused(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name == "vision_backbone.fused_featurizer.position_embedding.weight":
            yield "vision_backbone.fused_featurizer.pos_embed", tensor.unsqueeze(0)
        elif name.startswith("vision_backbone.") and ".attn.q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in ("q", "k", "v")]
            yield name.replace(".q_proj.", ".qkv."), torch.cat(parts)
        elif not (name.startswith("vision_backbone.") and re.search(r"\.attn\.[kv]_proj\.", name)):
            yield name, tensor
