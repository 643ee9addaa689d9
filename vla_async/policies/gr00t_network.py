"""The network of GR00T N1.5: a vision-language backbone (Eagle 2.5) that is read once per decision, and a DiT action head.

The backbone is transformers' SigLIP and the first layers of its Qwen3. See Bjorck et al., "GR00T N1", arXiv 2503.14734, for
the action head; N1.5 adds the layer norm and the self-attention over the backbone's features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from vla_async.policies.dit import ActionEncoder, Block, CategoryMLP, Context, DiT
from vla_async.policies.recompute import call
from vla_async.policies.size_fields import check_fields

# nvidia/GR00T-N1.5-3B: SigLIP2-400M at 224 x 224, and Qwen3-1.7B cut to 12 layers
_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 224,
    "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_TEXT = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
_POSITIONS = 1024
_BUCKET_ROUNDING = 1e-3  # of a bucket; a float32 time is a ten-thousandth of a bucket off


@dataclass(frozen=True, kw_only=True)
class Gr00tSizes:
    """Sizes of the network; the defaults are those of nvidia/GR00T-N1.5-3B.

    Args:
        vision: fields of transformers' ``SiglipVisionConfig``, over those of the release.
        text: fields of transformers' ``Qwen3Config``, over those of the release; ``num_hidden_layers`` is the number kept.
        connector_layers: linear layers between vision and language, 1 or 2.
        pixel_shuffle: whether 2 x 2 patches are joined before them, as other Eagle models do; N1.5 does not.
        dit_heads: attention heads of the DiT.
        dit_head_dim: features of one of them; the DiT's width is their product.
        dit_layers: blocks of the DiT.
        context_heads: attention heads of the self-attention over the backbone's features, of which they divide the width.
        context_layers: blocks of it.
        hidden_size: features of the DiT's output, and hidden features of the state encoder and the action decoder.
        future_tokens: learned tokens between the state and the actions.
        max_embodiments: embodiments that have weights of their own.
        max_state_dim: the state is padded to this.
        max_action_dim: A'.
        chunk_size: H'.
        time_buckets: number of times that the action head tells apart.

    Raises:
        ValueError: names the field and the fix.
    """

    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    connector_layers: int = 1
    pixel_shuffle: bool = False
    dit_heads: int = 32
    dit_head_dim: int = 48
    dit_layers: int = 16
    context_heads: int = 32
    context_layers: int = 4
    hidden_size: int = 1024
    future_tokens: int = 32
    max_embodiments: int = 32
    max_state_dim: int = 64
    max_action_dim: int = 32
    chunk_size: int = 16
    time_buckets: int = 1000

    def __post_init__(self) -> None:
        integers = (
            "dit_heads", "dit_head_dim", "dit_layers", "context_heads", "hidden_size", "max_embodiments", "max_state_dim",
            "max_action_dim", "chunk_size", "time_buckets",
        )  # fmt: skip
        for name in integers:
            if getattr(self, name) < 1:
                raise ValueError(f"model.config: {name}={getattr(self, name)} must be at least 1")
        for name in ("future_tokens", "context_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.config: {name}={getattr(self, name)} must not be negative")
        check_fields("vision", self.vision, SiglipVisionConfig)
        check_fields("text", self.text, Qwen3Config)
        if self.chunk_size > _POSITIONS:
            raise ValueError(f"model.config: chunk_size={self.chunk_size} is above the {_POSITIONS} positions of actions")
        if self.connector_layers not in (1, 2):
            raise ValueError(f"model.config: connector_layers={self.connector_layers} is unknown; choose 1 or 2")
        if self.width % 2:
            raise ValueError(f"model.config: the DiT's width dit_heads * dit_head_dim = {self.width} must be even")
        if self.context_dim % self.context_heads:
            raise ValueError(
                f"model.config: context_heads={self.context_heads} does not divide the backbone's width {self.context_dim}"
            )

    @property
    def width(self) -> int:
        """Features of the DiT's tokens."""
        return self.dit_heads * self.dit_head_dim

    @property
    def context_dim(self) -> int:
        """Features of the backbone's tokens."""
        return int(self.text_config["hidden_size"])

    @property
    def text_config(self) -> dict[str, Any]:
        return {**_TEXT, **self.text}

    @property
    def vision_config(self) -> dict[str, Any]:
        return {**_VISION, **self.vision, "vision_use_head": False}

    @property
    def image_size(self) -> int:
        """Height and width of the images."""
        return int(self.vision_config["image_size"])


class Gr00tCache(NamedTuple):
    """What the action head needs of a prefix: the state token ``[B, 1, width]``, and what the DiT looks at."""

    state: Tensor
    contexts: list[Context]


class EagleBackbone(nn.Module):
    """Images and a prompt, as features.

    Args:
        sizes: of all parts.
        frame: token ids of the prompt before each image, and after the last one, where the instruction follows.
    """

    frame: Tensor

    def __init__(self, sizes: Gr00tSizes, frame: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.pixel_shuffle = sizes.pixel_shuffle
        self.vision_model = SiglipVisionModel(SiglipVisionConfig(**sizes.vision_config))
        self.language_model = Qwen3Model(Qwen3Config(**sizes.text_config))
        inputs = sizes.vision_config["hidden_size"] * (4 if sizes.pixel_shuffle else 1)
        layers: list[nn.Module] = [nn.Linear(inputs, sizes.context_dim)]
        if sizes.connector_layers == 2:
            layers = [nn.LayerNorm(inputs), *layers, nn.GELU(), nn.Linear(sizes.context_dim, sizes.context_dim)]
        self.connector = nn.Sequential(*layers)
        # not in the state dict: the tokenizer says it, not the training
        self.register_buffer("frame", torch.tensor([token for part in frame for token in part]), persistent=False)
        self._lengths = [len(part) for part in frame]

    def _see(self, image: Tensor) -> Tensor:
        patches: Tensor = self.vision_model(pixel_values=image).last_hidden_state
        if self.pixel_shuffle:
            side = int(patches.shape[1] ** 0.5)
            square = patches.unflatten(1, (side // 2, 2, side // 2, 2))
            patches = square.transpose(2, 3).flatten(3).flatten(1, 2)
        seen: Tensor = self.connector(patches)
        return seen

    def forward(self, images: Sequence[Tensor], tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Read images and instruction.

        Args:
            images: per camera ``[B, 3, size, size]`` in [-1, 1].
            tokens: int64 ``[B, L]``, the instruction and what ends the prompt.
            token_mask: bool ``[B, L]``, false at padding, which comes last.

        Returns:
            Features ``[B, N, D]`` and their mask bool ``[B, N]``.
        """
        embed = self.language_model.embed_tokens
        dtype = embed.weight.dtype
        seen = self._see(torch.cat(list(images)).to(dtype)).chunk(len(images))
        rows = len(tokens)
        frame = [embed(part).expand(rows, -1, -1) for part in self.frame.split(self._lengths)]
        parts = [part for pair in zip(frame, seen, strict=False) for part in pair]
        x = torch.cat([*parts, frame[-1], embed(tokens)], dim=1)
        always = token_mask.new_ones(rows, x.shape[1] - tokens.shape[1])
        mask = torch.cat([always, token_mask], dim=1)
        features: Tensor = self.language_model(
            inputs_embeds=x, attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        return features, mask


class Gr00tNetwork(nn.Module):
    """Images, prompt and state in; the velocity of a noisy chunk out.

    Args:
        sizes: of all parts.
        frame: see :class:`EagleBackbone`.
        embodiment: which of the encoders and decoders to use.
        recompute: save memory by gradient checkpointing, while training.
    """

    def __init__(self, sizes: Gr00tSizes, frame: Sequence[Sequence[int]], embodiment: int, recompute: bool = False) -> None:
        super().__init__()
        self.sizes, self.embodiment, self.recompute = sizes, embodiment, recompute
        kinds, width, dim = sizes.max_embodiments, sizes.width, sizes.context_dim
        self.backbone = EagleBackbone(sizes, frame)
        if recompute:
            for model in (self.backbone.vision_model, self.backbone.language_model):
                model.activation_checkpointing_enable({"use_reentrant": False})
        self.context_norm = nn.LayerNorm(dim)
        heads = sizes.context_heads
        self.context_blocks = nn.ModuleList(Block(heads, dim // heads, adaptive=False) for _ in range(sizes.context_layers))
        self.state_encoder = CategoryMLP(kinds, sizes.max_state_dim, sizes.hidden_size, width)
        self.action_encoder = ActionEncoder(kinds, sizes.max_action_dim, width)
        self.action_decoder = CategoryMLP(kinds, sizes.hidden_size, sizes.hidden_size, sizes.max_action_dim)
        self.position_embedding = nn.Embedding(_POSITIONS, width)
        self.future_tokens = nn.Embedding(sizes.future_tokens, width)
        for embedding in (self.position_embedding, self.future_tokens):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dit = DiT(sizes.dit_heads, sizes.dit_head_dim, sizes.dit_layers, dim, sizes.hidden_size, recompute)

    def prefix(
        self, images: Sequence[Tensor], tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Gr00tCache]:
        """Read an observation.

        Padding is masked out. The release does not mask it, so there the answer depends on what else is in the batch; here
        it is the one that the release gives to a single request.

        Args:
            images: as in :class:`EagleBackbone`, with tokens and their mask.
            tokens: int64 ``[B, L]``.
            token_mask: bool ``[B, L]``.
            state: ``[B, max_state_dim]``.

        Returns:
            Features ``[B, N, D]``, their mask bool ``[B, N]``, and what :meth:`velocity` needs.
        """
        features, mask = self.backbone(images, tokens, token_mask)
        features = self.context_norm(features)
        for block in self.context_blocks:
            features = call(block, features, None, None, mask, recompute=self.recompute)
        state_token = self.state_encoder(state.to(features.dtype).unsqueeze(1), self.embodiment)
        return features, mask, Gr00tCache(state_token, self.dit.project(features, mask))

    def velocity(self, cache: Gr00tCache, x_t: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """GR00T's own velocity, actions minus noise.

        Args:
            cache: of the prefix.
            x_t: noisy chunks ``[B, H', A']``.
            time: ``[B]``, from 0 (noise) to 1 (actions).

        Returns:
            float32 ``[B, H', A']``, and the features ``[B, H', hidden_size]`` that it is read from.
        """
        bucket = (time * self.sizes.time_buckets + _BUCKET_ROUNDING).long()
        actions = self.action_encoder(x_t.to(cache.state.dtype), bucket, self.embodiment)
        actions = actions + self.position_embedding.weight[: actions.shape[1]]
        future = self.future_tokens.weight.expand(len(x_t), -1, -1)
        output = self.dit(torch.cat([cache.state, future, actions], dim=1), bucket, cache.contexts)
        features: Tensor = output[:, -x_t.shape[1] :]
        return self.action_decoder(features, self.embodiment).float(), features
