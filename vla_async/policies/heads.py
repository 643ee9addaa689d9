"""Action heads: what a trunk's outputs mean as a distribution over the chunk ``[H, A]``, element by element.

Inside a head, actions are scaled so that the bounds of each element become -1 and 1; log-probs and entropies are those of
the scaled action. The scale cancels in every ratio.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from vla_async.envs.base import EnvSpec
from vla_async.rng import normal, uniform


class ActionHead(nn.Module, ABC):
    """One distribution per action element.

    Args:
        spec: the envs; their bounds set the scale.
    """

    outputs: int  # trunk outputs per action element
    action_middle: Tensor
    action_half_range: Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        bounded = torch.isfinite(low) & torch.isfinite(high)
        # not in the state dict: the envs say it, not the training
        self.register_buffer("action_middle", torch.where(bounded, (low + high) / 2, 0.0), persistent=False)
        self.register_buffer("action_half_range", torch.where(bounded, (high - low) / 2, 1.0), persistent=False)

    def scale(self, chunk: Tensor) -> Tensor:
        """From the env's units to [-1, 1]."""
        return (chunk - self.action_middle) / self.action_half_range

    def unscale(self, chunk: Tensor) -> Tensor:
        """From [-1, 1] to the env's units."""
        return chunk * self.action_half_range + self.action_middle

    @abstractmethod
    def mode(self, outputs: Tensor) -> dict[str, Tensor]:
        """The most likely chunk, from trunk outputs ``[*B, H, A, outputs]``; keys ``chunk`` and, for bins, ``tokens``."""

    @abstractmethod
    def sample(self, outputs: Tensor, request_keys: Tensor | None) -> dict[str, Tensor]:
        """A random chunk, as :meth:`mode`. Its noise depends on the request key ``[*B]`` of its row alone, if any."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, chunk: Tensor) -> Tensor:
        """Log-prob ``[*B, H, A]`` of a chunk in the env's units."""

    @abstractmethod
    def entropy(self, outputs: Tensor) -> Tensor:
        """Entropy ``[*B, H, A]``."""


class GaussianHead(ActionHead):
    """A normal distribution whose deviation is learned per action element, the same for all observations.

    The mean and the samples are not squashed: the env clips what lies outside its bounds. A squashed mean could only
    approach the saturated actions that demonstrations are full of, and would have no gradient near them.

    The deviation is held between its limits by a sigmoid, which, unlike a clamp, has a gradient at the limits.

    Args:
        spec: the envs.
        init_std: deviation at the start, as a share of half the action range.
        min_std: lower limit of the deviation.
        max_std: upper limit of the deviation.
    """

    outputs = 1

    def __init__(self, spec: EnvSpec, init_std: float, min_std: float, max_std: float) -> None:
        super().__init__(spec)
        self.log_limits = math.log(min_std), math.log(max_std)
        share = (math.log(init_std) - self.log_limits[0]) / (self.log_limits[1] - self.log_limits[0])
        self.std_logit = nn.Parameter(torch.full((spec.action_dim,), math.log(share / (1.0 - share))))

    @property
    def log_std(self) -> Tensor:
        """``[A]``, of the scaled action."""
        low, high = self.log_limits
        return low + (high - low) * torch.sigmoid(self.std_logit)

    def mode(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"chunk": self.unscale(outputs.squeeze(-1).float())}

    def sample(self, outputs: Tensor, request_keys: Tensor | None) -> dict[str, Tensor]:
        mean = outputs.squeeze(-1).float()
        noise = torch.randn_like(mean) if request_keys is None else normal(request_keys, *mean.shape[-2:])
        return {"chunk": self.unscale(mean + noise * self.log_std.exp())}

    def log_prob(self, outputs: Tensor, chunk: Tensor) -> Tensor:
        log_std = self.log_std
        deviations = (self.scale(chunk) - outputs.squeeze(-1).float()) * torch.exp(-log_std)
        return -0.5 * deviations**2 - log_std - 0.5 * math.log(2.0 * math.pi)

    def entropy(self, outputs: Tensor) -> Tensor:
        return (self.log_std + 0.5 * math.log(2.0 * math.pi * math.e)).expand(outputs.shape[:-1])

    def squared_error(self, outputs: Tensor, chunk: Tensor) -> Tensor:
        """Squared distance ``[*B, H, A]`` of the mean to a chunk, scaled."""
        return (outputs.squeeze(-1).float() - self.scale(chunk)) ** 2


class TokenHead(ActionHead):
    """A categorical distribution over bins that span the bounds of each action element, both bounds included.

    Args:
        spec: the envs; every action element needs finite bounds.
        num_bins: number of bins.
    """

    def __init__(self, spec: EnvSpec, num_bins: int) -> None:
        super().__init__(spec)
        if not all(map(math.isfinite, spec.action_low + spec.action_high)):
            raise ValueError("model.head='tokens' needs action bounds, but the envs' actions are unbounded; use 'gaussian'")
        self.outputs = num_bins

    def tokens(self, chunk: Tensor) -> Tensor:
        """The nearest bin of each element of a chunk in the env's units, int64."""
        share = (self.scale(chunk) + 1.0) / 2.0
        return (share * (self.outputs - 1)).round().long().clamp(0, self.outputs - 1)

    def _decode(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"tokens": tokens, "chunk": self.unscale(tokens.float() * (2.0 / (self.outputs - 1)) - 1.0)}

    def mode(self, outputs: Tensor) -> dict[str, Tensor]:
        return self._decode(outputs.argmax(-1))

    def sample(self, outputs: Tensor, request_keys: Tensor | None) -> dict[str, Tensor]:
        cumulative = torch.softmax(outputs.float(), dim=-1).cumsum(-1)
        shape = cumulative.shape[-3:-1]
        if request_keys is None:
            level = torch.rand(cumulative.shape[:-1], device=cumulative.device)
        else:
            level = uniform(request_keys, *shape)
        # the last sum can round to just below 1
        return self._decode((cumulative < level.unsqueeze(-1)).sum(-1).clamp(max=self.outputs - 1))

    def log_prob(self, outputs: Tensor, chunk: Tensor) -> Tensor:
        log_probs = torch.log_softmax(outputs.float(), dim=-1)
        return log_probs.gather(-1, self.tokens(chunk).unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        log_probs = torch.log_softmax(outputs.float(), dim=-1)
        return -(log_probs.exp() * log_probs).sum(-1)
