"""PaliGemma and an action expert, run block by block: what π0 and π0.5 share.

The vision-language model reads the prefix (cameras, then the prompt) once per decision. The action expert, a narrower
Gemma, then reads the suffix once per denoising step, and each of its layers attends to the keys and values that the
prefix left in the layer of the same number (π0, arXiv 2410.24164, section IV).

The blocks are transformers'. They are called one by one because transformers' own loops write into a cache in place, and
drop it where gradients are checkpointed, while training needs the same prefix many times, with gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_async.policies.recompute import call

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, each ``[B, heads, N, head_dim]``."""


@dataclass(frozen=True)
class PrefixCache:
    """What the suffix attends to.

    Attributes:
        layers: keys and values of the prefix, by layer.
        mask: bool ``[B, N]``, false where the prefix is padding.
        state: ``[B, state_dim]`` of the model where the suffix begins with a state token, else None.
    """

    layers: list[KeysValues]
    mask: Tensor
    state: Tensor | None = None


class _LayerMemory:
    """Stands in for a transformers cache in one layer: prepends the past, and keeps only what this layer made."""

    def __init__(self, past: KeysValues | None) -> None:
        self.past = past

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **unused: Any) -> KeysValues:
        self.made = (keys, values)
        if self.past is None:
            return keys, values
        return torch.cat([self.past[0], keys], dim=-2), torch.cat([self.past[1], values], dim=-2)


def _run_layer(
    layer: nn.Module, hidden: Tensor, mask: Tensor, rotary: KeysValues, past: KeysValues | None, more: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    memory = _LayerMemory(past)
    hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, cache=memory, **more)
    return hidden, *memory.made


def run_gemma(
    gemma: Any,
    hidden: Tensor,
    mask: Tensor,
    positions: Tensor,
    past: list[KeysValues] | None = None,
    recompute: bool = False,
    **more: Tensor,
) -> tuple[Tensor, list[KeysValues]]:
    """Run all layers of a Gemma model and its last norm.

    Args:
        gemma: has ``layers``, ``norm`` and ``rotary_emb``.
        hidden: embeddings ``[B, S, D]``.
        mask: bool ``[B, 1, S, N + S]``, true where a query (row) sees a key (column).
        positions: int64 ``[B, S]``.
        past: keys and values of the N tokens before, by layer; not changed.
        recompute: save memory by gradient checkpointing.
        more: further arguments of every layer and of the last norm.

    Returns:
        The last hidden states ``[B, S, D]``, and the keys and values of the S tokens by layer.
    """
    rotary = gemma.rotary_emb(hidden, position_ids=positions)
    made = []
    for index, layer in enumerate(gemma.layers):
        before = None if past is None else past[index]
        hidden, keys, values = call(_run_layer, layer, hidden, mask, rotary, before, more, recompute=recompute)
        made.append((keys, values))
    return gemma.norm(hidden, **more), made


def embed_images(vlm: Any, pixels: Tensor, recompute: bool = False) -> Tensor:
    """Image tokens ``[N, tokens, D]`` of images ``[N, 3, S, S]`` in [-1, 1].

    Args:
        vlm: a transformers ``PaliGemmaModel``.
        pixels: in the size that the vision tower takes.
        recompute: save memory by gradient checkpointing.
    """
    tower = vlm.vision_tower
    hidden = tower.embeddings(pixels)
    for layer in tower.encoder.layers:
        hidden = call(layer, hidden, None, recompute=recompute)
    tokens: Tensor = vlm.multi_modal_projector(tower.post_layernorm(hidden))
    return tokens


def run_prefix(vlm: Any, embeddings: Tensor, mask: Tensor, recompute: bool = False) -> tuple[Tensor, list[KeysValues]]:
    """Let the language model read a prefix in which every token sees every other, but no padding.

    Padding may stand anywhere: it takes no position, and nothing attends to it.

    Args:
        vlm: a transformers ``PaliGemmaModel``.
        embeddings: ``[B, N, D]``.
        mask: bool ``[B, N]``, false at padding; at least one token of each row is none.
        recompute: save memory by gradient checkpointing.

    Returns:
        As :func:`run_gemma`.
    """
    length = mask.shape[1]
    sees = mask[:, None, None, :].expand(-1, 1, length, length)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return run_gemma(vlm.language_model, embeddings, sees, positions, recompute=recompute)


def run_suffix(
    expert: nn.Module, embeddings: Tensor, blocks: Tensor, cache: PrefixCache, recompute: bool = False, **more: Tensor
) -> Tensor:
    """Let the action expert read a suffix, which sees the whole prefix and of itself the blocks up to a token's own.

    Args:
        expert: as ``gemma`` of :func:`run_gemma`.
        embeddings: ``[B, S, D]``.
        blocks: int64 ``[S]``, the block of each token, rising.
        cache: of the prefix; not changed.
        recompute: save memory by gradient checkpointing.
        more: as in :func:`run_gemma`.

    Returns:
        The last hidden states ``[B, S, D]``.
    """
    batch, length = embeddings.shape[:2]
    within = (blocks[None, :] <= blocks[:, None]).expand(batch, 1, length, length)
    sees = torch.cat([cache.mask[:, None, None, :].expand(-1, 1, length, -1), within], dim=-1)
    positions = cache.mask.sum(-1, keepdim=True) + torch.arange(length, device=embeddings.device)
    return run_gemma(expert, embeddings, sees, positions, cache.layers, recompute, **more)[0]


class AdaptiveRMSNorm(nn.Module):
    """An RMS norm whose scale and shift come from a condition, and which says how much of its branch to add (AdaRMS, π0.5).

    It begins as a plain norm with a closed gate, as in DiT (arXiv 2212.09748, section 3.2).

    Args:
        dim: D.
        condition_dim: C.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, condition_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(condition_dim, 3 * dim)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise ``[B, S, D]`` by a condition ``[B, C]``: the result, and the gate ``[B, 1, D]`` of the branch."""
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype)).unsqueeze(1).chunk(3, dim=-1)
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class _AdaptiveLayer(nn.Module):
    """A Gemma layer with adaptive norms: transformers' attention and MLP, our norms and gates."""

    def __init__(self, config: Any, index: int) -> None:
        from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP

        super().__init__()
        self.self_attn, self.mlp = GemmaAttention(config, index), GemmaMLP(config)
        width = config.hidden_size
        self.input_layernorm = AdaptiveRMSNorm(width, width, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveRMSNorm(width, width, config.rms_norm_eps)

    def forward(self, hidden: Tensor, condition: Tensor, **attention: Any) -> Tensor:
        normed, gate = self.input_layernorm(hidden, condition)
        hidden = hidden + gate * self.self_attn(normed, **attention)[0]
        normed, gate = self.post_attention_layernorm(hidden, condition)
        moved: Tensor = hidden + gate * self.mlp(normed)
        return moved


class _AdaptiveNorm(AdaptiveRMSNorm):
    """The last norm, after which there is nothing to gate."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, condition)[0]


class AdaptiveGemma(nn.Module):
    """A Gemma without embeddings whose norms are adaptive; run it by :func:`run_suffix` with ``condition`` ``[B, D]``.

    Args:
        config: a transformers ``GemmaConfig``.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

        super().__init__()
        self.layers = nn.ModuleList(_AdaptiveLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = _AdaptiveNorm(config.hidden_size, config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)


class Pi05Model(nn.Module):
    """The modules of π0.5: PaliGemma, an expert whose norms are conditioned on the flow's time, and projections.

    Args:
        config: a transformers ``PI0Config``; its state projection has no use here.
    """

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel
        from transformers.models.pi0.modeling_pi0 import PI0TimestepEmbeddings

        super().__init__()
        width = config.dit_config.hidden_size
        self.vlm = AutoModel.from_config(config.vlm_config)
        self.expert = AdaptiveGemma(config.dit_config)
        self.time_embedding = PI0TimestepEmbeddings(config)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)

    def condition(self, t: Tensor) -> Tensor:
        """What the norms are conditioned on, ``[B, D]``, from the flow's time ``[B]``."""
        hidden = functional.silu(self.time_mlp_in(self.time_embedding(t).to(self.time_mlp_in.weight.dtype)))
        return functional.silu(self.time_mlp_out(hidden))
