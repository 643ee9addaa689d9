"""The parts of a GR00T action head: encoders and a decoder per embodiment, and a diffusion transformer (DiT).

The DiT alternates cross-attention to a context (vision and language) with self-attention, and is told the time by adaptive
layer norms (Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748; Bjorck et al., "GR00T N1",
arXiv 2503.14734). There is no dropout anywhere: a decision's log-prob could not be recomputed under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_async.policies.recompute import call


class Context(NamedTuple):
    """What the cross-attention of one block looks at, projected once per decision.

    Attributes:
        keys: ``[B, heads, S, head_dim]``.
        values: ``[B, heads, S, head_dim]``.
        mask: bool ``[B, 1, 1, S]``, false at padding.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class CategoryLinear(nn.Module):
    """One linear layer per category (embodiment), of which a call uses one.

    Args:
        categories: number of embodiments.
        inputs: input features.
        outputs: output features.
    """

    def __init__(self, categories: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(categories, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(categories, outputs))

    def forward(self, x: Tensor, category: int) -> Tensor:
        """``[B, T, inputs]`` to ``[B, T, outputs]``."""
        return functional.linear(x, self.weight[category].T, self.bias[category])


class CategoryMLP(nn.Module):
    """Two layers with a ReLU between them, per category; arguments as in :class:`CategoryLinear`."""

    def __init__(self, categories: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(categories, inputs, hidden)
        self.layer2 = CategoryLinear(categories, hidden, outputs)

    def forward(self, x: Tensor, category: int) -> Tensor:
        """``[B, T, inputs]`` to ``[B, T, outputs]``."""
        hidden: Tensor = torch.relu(self.layer1(x, category))
        output: Tensor = self.layer2(hidden, category)
        return output


class ActionEncoder(nn.Module):
    """Noisy actions and their time, as tokens.

    Args:
        categories: number of embodiments.
        action_dim: A'.
        width: features of a token.
    """

    def __init__(self, categories: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer1 = CategoryLinear(categories, action_dim, width)
        self.layer2 = CategoryLinear(categories, 2 * width, width)
        self.layer3 = CategoryLinear(categories, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, category: int) -> Tensor:
        """``[B, H', A']`` at time buckets ``[B]`` to ``[B, H', width]``."""
        half = self.width // 2
        embedded: Tensor = self.layer1(actions, category)
        time = sinusoid(bucket, half, half).to(embedded.dtype).unsqueeze(1).expand(-1, actions.shape[1], -1)
        hidden = functional.silu(self.layer2(torch.cat([embedded, time], dim=-1), category))
        tokens: Tensor = self.layer3(hidden, category)
        return tokens


def sinusoid(position: Tensor, frequencies: int, span: int) -> Tensor:
    """Sines, then cosines, of a position at frequencies that fall geometrically from 1.

    Args:
        position: ``[B]``.
        frequencies: number of frequencies n.
        span: the number of frequencies after which they would have fallen to 1/10000.

    Returns:
        float32 ``[B, 2 n]``.
    """
    exponent = torch.arange(frequencies, device=position.device, dtype=torch.float32) / span
    angles = position.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class TimeEncoder(nn.Module):
    """A time bucket as a vector ``[B, width]``."""

    frequencies = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * self.frequencies, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """Int64 ``[B]`` to ``[B, width]``."""
        sines, cosines = sinusoid(bucket, self.frequencies, self.frequencies - 1).chunk(2, dim=-1)
        waves = torch.cat([cosines, sines], dim=-1).to(self.linear_1.weight.dtype)
        encoded: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return encoded


class AdaptiveNorm(nn.Module):
    """A layer norm whose scale and shift depend on the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``[B, T, width]`` under a time ``[B, width]``."""
        scale, shift = self.linear(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        normed: Tensor = self.norm(x) * (1 + scale) + shift
        return normed


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input.

    Args:
        heads: number of attention heads.
        head_dim: features of a head; the width is ``heads * head_dim``.
        context_dim: features of the context that a cross-attention block looks at; None for self-attention.
        adaptive: whether the time sets the scale and the shift of the first norm.
    """

    def __init__(self, heads: int, head_dim: int, context_dim: int | None = None, adaptive: bool = True) -> None:
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.norm1: nn.Module = AdaptiveNorm(width) if adaptive else nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not adaptive)
        source = width if context_dim is None else context_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, width) for size in (width, source, source))
        self.to_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def project(self, context: Tensor, mask: Tensor) -> Context:
        """Keys and values of a context ``[B, S, context_dim]`` with a mask ``[B, S]`` that is false at padding."""
        return Context(self._split(self.to_k(context)), self._split(self.to_v(context)), mask[:, None, None, :])

    def forward(
        self, x: Tensor, time: Tensor | None = None, context: Context | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``[B, T, width]`` to the same; ``mask`` (bool ``[B, T]``) is false where ``x`` itself is padding."""
        normed = self.norm1(x) if time is None else self.norm1(x, time)
        if context is None:
            context = self.project(normed, torch.ones_like(normed[..., 0], dtype=torch.bool) if mask is None else mask)
        query = self._split(self.to_q(normed))
        attended = functional.scaled_dot_product_attention(query, context.keys, context.values, attn_mask=context.mask)
        x = x + self.to_out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.feed_forward(self.norm3(x))
        return hidden


class DiT(nn.Module):
    """Blocks that alternate cross-attention to a context (the even ones) with self-attention.

    Args:
        heads: attention heads.
        head_dim: features of a head.
        num_layers: number of blocks.
        context_dim: features of the context.
        output_dim: features of the output.
        recompute: save memory by gradient checkpointing.
    """

    def __init__(
        self, heads: int, head_dim: int, num_layers: int, context_dim: int, output_dim: int, recompute: bool = False
    ) -> None:
        super().__init__()
        width, self.recompute = heads * head_dim, recompute
        self.time_encoder = TimeEncoder(width)
        dims = [context_dim if index % 2 == 0 else None for index in range(num_layers)]
        self.blocks = nn.ModuleList(Block(heads, head_dim, dim) for dim in dims)
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, output_dim)

    def project(self, context: Tensor, mask: Tensor) -> list[Context]:
        """What each cross-attention block will look at; arguments as in :meth:`Block.project`."""
        return [cast(Block, block).project(context, mask) for block in self.blocks[::2]]

    def forward(self, x: Tensor, bucket: Tensor, contexts: Sequence[Context]) -> Tensor:
        """``[B, T, width]`` at time buckets ``[B]``, looking at :meth:`project`'s result, to ``[B, T, output_dim]``."""
        time = self.time_encoder(bucket)
        for index, block in enumerate(self.blocks):
            x = call(block, x, time, contexts[index // 2] if index % 2 == 0 else None, recompute=self.recompute)
        shift, scale = self.proj_out_1(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        output: Tensor = self.proj_out_2(self.norm_out(x) * (1 + scale) + shift)
        return output
