"""The critic of a flow-matching policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vla_async.policies.encoders import mlp


class ValueHead(nn.Module):
    """A value from a mean of features, in float32 unless its own weights are of another type.

    Args:
        dim: length of the features.
        hidden: widths of the hidden layers.
        detach: whether the features are only read.
    """

    def __init__(self, dim: int, hidden: Sequence[int], detach: bool) -> None:
        super().__init__()
        self.detach = detach
        # hidden states of large models are too large for a tanh
        self.norm = nn.LayerNorm(dim)
        self.layers = mlp([dim, *hidden, 1], output_gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, dim]`` to float32 ``[B, 1]``."""
        features = features.detach() if self.detach else features
        with torch.autocast(features.device.type, enabled=False):
            value: Tensor = self.layers(self.norm(features.to(self.norm.weight.dtype)))
        return value.float()


def masked_mean(features: Tensor, mask: Tensor) -> Tensor:
    """The mean ``[B, D]``, float32, of features ``[B, N, D]`` over the tokens that ``mask`` ``[B, N]`` lets through."""
    valid = mask.unsqueeze(-1)
    return torch.where(valid, features.float(), 0.0).sum(1) / valid.sum(1).clamp(min=1)
