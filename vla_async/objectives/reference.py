"""A policy as it was when a run began, for a KL penalty that keeps the trained one near it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy


class Reference:
    """The trainable weights of a policy at one moment; what is frozen is shared with it, so an adapter costs little.

    Args:
        weights: parameter name to tensor.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    @classmethod
    def of(cls, policy: VLAPolicy) -> Reference:
        """Copy a policy's trainable weights.

        Raises:
            ValueError: if they are sharded over ranks, for then they cannot be exchanged in a forward pass.
        """
        trainable = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
        sharded = [name for name, p in trainable.items() if hasattr(p, "placements")]
        if sharded:
            raise ValueError(
                f"objective.kl_coef needs whole parameters, but {sharded[0]} is sharded; use a strategy that keeps them "
                f"whole, or put {keys.REFERENCE_LOG_PROB!r} into the batch"
            )
        return cls({name: p.clone() for name, p in trainable.items()})

    @torch.no_grad()
    def log_prob(self, policy: VLAPolicy, batch: TensorDictBase) -> Tensor:
        """The log-prob ``[B, H, A]`` that these weights give to the decisions of a batch; the policy keeps its own."""
        self.weights = {name: weight.to(policy.get_parameter(name).device) for name, weight in self.weights.items()}
        weights = {f"policy.{name}": weight for name, weight in self.weights.items()}
        result: Tensor = torch.func.functional_call(_LogProb(policy), weights, (batch,))
        return result


class _LogProb(nn.Module):
    """``policy.evaluate`` as a forward pass, which is what torch can call with other weights."""

    def __init__(self, policy: VLAPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: TensorDictBase) -> Tensor:
        log_prob: Tensor = self.policy.evaluate(batch)[keys.LOG_PROB]
        return log_prob
