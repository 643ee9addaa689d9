"""Actions as tokens: the bins of OpenVLA, and what they mean in the envs' units."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vla_async.policies.processing import Normalizer
from vla_async.rng import uniform

Gripper = Literal["as_is", "open_is_one"]
"""What the last action element means to the model.

``as_is``: what the statistics say, like all others. ``open_is_one``: the model was trained on grippers that are 1 when open
and 0 when closed, as the data of Open X-Embodiment; the envs want -1 to open and 1 to close, as LIBERO does.
"""


class ActionBins(nn.Module):
    """Between bins ``[*B, H, A]`` and actions in the envs' units.

    ``num_bins`` edges lie evenly in [-1, 1], and a bin stands for the middle between its edge and the next. There is one
    middle less than there are bins, so the two highest bins mean the same action.

    Args:
        normalizer: of the actions.
        num_bins: number of bins of an element.
        gripper: see :data:`Gripper`.
    """

    edges: Tensor

    def __init__(self, normalizer: Normalizer, num_bins: int, gripper: Gripper) -> None:
        super().__init__()
        self.normalizer, self.gripper = normalizer, gripper
        self.register_buffer("edges", torch.linspace(-1.0, 1.0, num_bins), persistent=False)

    def decode(self, bins: Tensor) -> Tensor:
        """The actions of bins, int64 to float32."""
        middles = (self.edges[:-1] + self.edges[1:]) / 2.0
        actions = self.normalizer.unnormalize(middles[bins.clamp(max=len(middles) - 1)])
        if self.gripper == "as_is":
            return actions
        closing = torch.where(actions[..., -1:] > 0.5, -1.0, 1.0)
        return torch.cat([actions[..., :-1], closing], dim=-1)

    def encode(self, actions: Tensor) -> Tensor:
        """The bins of actions, int64; what lies outside the range gets the outermost bins."""
        if self.gripper == "open_is_one":
            opened = (1.0 - actions[..., -1:].clamp(-1.0, 1.0)) / 2.0
            actions = torch.cat([actions[..., :-1], opened], dim=-1)
        normalized = self.normalizer.normalize(actions).clamp(-1.0, 1.0)
        return torch.bucketize(normalized, self.edges, right=True) - 1


def sample_bins(log_probs: Tensor, request_keys: Tensor | None) -> Tensor:
    """Draw a bin of each action element.

    Args:
        log_probs: float32 ``[B, H, A, bins]``, normalised.
        request_keys: int64 ``[B]``, which alone determine the draw of their rows; None takes torch's global generator.

    Returns:
        int64 ``[B, H, A]``.
    """
    cumulative = log_probs.exp().cumsum(-1)
    shape = cumulative.shape[1:-1]
    if request_keys is None:
        level = torch.rand(cumulative.shape[:-1], device=cumulative.device)
    else:
        level = uniform(request_keys, *shape)
    # the last sum can round to just below 1; scaled by it, a level never lies above
    return (cumulative < level.unsqueeze(-1) * cumulative[..., -1:]).sum(-1)


def of_bins(log_probs: Tensor, bins: Tensor) -> Tensor:
    """The log-probs ``[...]`` of some bins ``[...]``, out of those of all bins ``[..., bins]``."""
    return log_probs.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
