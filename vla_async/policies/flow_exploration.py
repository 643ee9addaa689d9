"""How a flow explores: from the velocity field of a batch of decisions to chunks with a log-prob, and back to the log-prob.

Noise enters only the elements that are executed, the first H actions and the first A of their dimensions; all others follow
the ODE. So the log-prob over ``[H, A]`` is all of it.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.policies.encoders import mlp
from vla_async.policies.flow_sampling import (
    Draws,
    euler_step,
    gaussian_entropy,
    gaussian_log_prob,
    per_row,
    sde_moments,
    time_of,
)

Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""The velocity field of a batch: ``x_t`` ``[B, H', A']`` and ``t`` ``[B]`` to the velocity ``[B, H', A']``, float32, and the
suffix features ``[B, H', D]`` that it was read from, if the model tells them."""

_START, _STEP, _NOISE = 0, 1, 2  # streams of a request's random numbers; step k of Flow-Noise has _NOISE + k


@dataclass(frozen=True)
class FlowShape:
    """The sizes of a flow.

    Attributes:
        horizon: H', the actions that the model makes.
        model_dim: A', the dimensions of each.
        chunk_size: H, of which so many are executed.
        action_dim: A, in so many dimensions.
        num_steps: K.
    """

    horizon: int
    model_dim: int
    chunk_size: int
    action_dim: int
    num_steps: int

    def executed(self, x: Tensor) -> Tensor:
        """The part ``[B, H, A]`` of ``[B, H', A']`` that an env sees."""
        return x[:, : self.chunk_size, : self.action_dim]

    def with_executed(self, x: Tensor, part: Tensor) -> Tensor:
        """A copy of ``x`` ``[B, H', A']`` with another executed part ``[B, H, A]``."""
        x = x.clone()
        x[:, : self.chunk_size, : self.action_dim] = part
        return x

    def pool(self, features: Tensor | None) -> Tensor | None:
        """The mean ``[B, D]`` of suffix features ``[B, H', D]`` over the executed actions."""
        return None if features is None else features[:, : self.chunk_size].float().mean(1)


@dataclass(frozen=True)
class Sampled:
    """Chunks, by :meth:`Exploration.sample`.

    Attributes:
        chunk: float32 ``[B, H, A]``, in the model's space.
        log_prob: float32 ``[B, H, A]``; None if there is none.
        features: pooled suffix features ``[B, D]``, if the field gives them.
        stored: what :meth:`Exploration.recompute` will read, by key.
    """

    chunk: Tensor
    log_prob: Tensor | None
    features: Tensor | None
    stored: dict[NestedKey, Tensor]


@dataclass(frozen=True)
class Recomputed:
    """What the field says of stored chunks, by :meth:`Exploration.recompute`; attributes as in :class:`Sampled`.

    Attributes:
        entropy: float32 ``[B, H, A]``.
    """

    log_prob: Tensor
    entropy: Tensor
    features: Tensor | None


class Exploration(nn.Module, ABC):
    """Samples chunks from a velocity field.

    Args:
        shape: the sizes of the flow.
    """

    def __init__(self, shape: FlowShape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def sample(self, field: Field, draws: Draws, explore: bool) -> Sampled:
        """Decide.

        Args:
            field: the velocity field of the batch.
            draws: the random numbers of its rows.
            explore: whether to add noise; without, the chunk is the ODE's, from the noise of ``draws``.
        """

    @abstractmethod
    def recompute(self, field: Field, td: TensorDictBase) -> Recomputed:
        """Log-prob and entropy of the decisions stored in ``td`` ``[B]``, with gradient.

        Raises:
            RuntimeError: if chunks sampled like this have no log-prob.
        """

    def _start(self, draws: Draws) -> Tensor:
        return draws.normal(self.shape.horizon, self.shape.model_dim, stream=_START)


class FlowODE(Exploration):
    """No exploration beyond the noise that a chunk starts from: to imitate and to evaluate. There is no log-prob."""

    def sample(self, field: Field, draws: Draws, explore: bool) -> Sampled:
        x, pooled = self._start(draws), list[Tensor | None]()
        for step in range(self.shape.num_steps):
            velocity, features = field(x, time_of(torch.full((draws.rows,), step, device=x.device), self.shape.num_steps))
            x = euler_step(x, velocity, self.shape.num_steps)
            pooled.append(self.shape.pool(features))
        return Sampled(self.shape.executed(x), None, _mean(pooled), {})

    def recompute(self, field: Field, td: TensorDictBase) -> Recomputed:
        raise RuntimeError("model.noise='ode' has no log-prob to train with; choose flow_sde or flow_noise")


class FlowSDE(Exploration):
    """Flow-SDE (πRL, arXiv 2510.25889, section 4): one denoising step is stochastic, the others follow the ODE.

    Which one is drawn per decision, from its own request key, and stored, with where the step started and what it made of
    the executed part. A log-prob is then one velocity. Without exploration that step, too, follows the ODE, and the
    log-prob is the one that exploring would have given to this outcome.

    Args:
        shape: the sizes of the flow.
        noise_level: a, see :func:`~vla_async.policies.flow_sampling.sde_moments`.
    """

    def __init__(self, shape: FlowShape, noise_level: float) -> None:
        super().__init__(shape)
        self.noise_level = noise_level

    def _moments(self, x_t: Tensor, velocity: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        executed = self.shape.executed
        return sde_moments(executed(x_t), executed(velocity), step, self.shape.num_steps, self.noise_level)

    def sample(self, field: Field, draws: Draws, explore: bool) -> Sampled:
        shape, x = self.shape, self._start(draws)
        index = draws.integer(shape.num_steps, _STEP)
        noise = draws.normal(shape.chunk_size, shape.action_dim, stream=_NOISE)
        at, velocity_at, features_at = x, torch.zeros_like(x), None
        after = shape.executed(x)
        for number in range(shape.num_steps):
            step = torch.full_like(index, number)
            velocity, features = field(x, time_of(step, shape.num_steps))
            pooled, following = shape.pool(features), euler_step(x, velocity, shape.num_steps)
            chosen = step == index
            rows = per_row(chosen, x)
            part = shape.executed(following)
            if explore:
                mean, std = self._moments(x, velocity, step)
                part = torch.where(rows, mean + std * noise, part)
                following = shape.with_executed(following, part)
            at, velocity_at = torch.where(rows, x, at), torch.where(rows, velocity, velocity_at)
            after = torch.where(rows, part, after)
            if pooled is not None:
                features_at = pooled if features_at is None else torch.where(per_row(chosen, pooled), pooled, features_at)
            x = following
        log_prob = gaussian_log_prob(after, *self._moments(at, velocity_at, index))
        stored: dict[NestedKey, Tensor] = {keys.FLOW_STEP: index.unsqueeze(-1), keys.FLOW_X_T: at, keys.FLOW_X_NEXT: after}
        return Sampled(shape.executed(x), log_prob, features_at, stored)

    def recompute(self, field: Field, td: TensorDictBase) -> Recomputed:
        x_t, step = td[keys.FLOW_X_T], td[keys.FLOW_STEP].squeeze(-1)
        velocity, features = field(x_t, time_of(step, self.shape.num_steps))
        mean, std = self._moments(x_t, velocity, step)
        log_prob = gaussian_log_prob(td[keys.FLOW_X_NEXT], mean, std)
        return Recomputed(log_prob, gaussian_entropy(std).expand_as(log_prob), self.shape.pool(features))


class FlowNoise(Exploration):
    """Flow-Noise (πRL, arXiv 2510.25889, section 4): every denoising step gets noise of a learned deviation.

    The whole path is stored. Its log-density is that of K steps and of the noise it starts from, K + 1 terms, of which the
    *mean* counts, as in the method's public code: a ratio of two policies is then the (K + 1)-th root of that of their
    paths, and the clip range means the same for every K. The entropy is the mean of the same terms'.

    Args:
        shape: the sizes of the flow.
        noise_std: the limits of the deviation; it starts at their geometric mean.
        suffix_dim: length of the suffix features, from which the deviation is read besides; None if the field has none.
        hidden: widths of the hidden layers between.
    """

    def __init__(
        self, shape: FlowShape, noise_std: tuple[float, float], suffix_dim: int | None, hidden: Sequence[int]
    ) -> None:
        super().__init__(shape)
        self.log_limits = math.log(noise_std[0]), math.log(noise_std[1])
        self.std_logit = nn.Parameter(torch.zeros(shape.num_steps, shape.action_dim))
        self.std_net = None if suffix_dim is None else mlp([suffix_dim, *hidden, shape.action_dim], output_gain=0.01)

    def _std(self, number: int, features: Tensor | None) -> Tensor:
        """The deviation at a step, float32, broadcasts to ``[B, H, A]``."""
        logit = self.std_logit[number].float()
        if self.std_net is not None:
            assert features is not None
            executed = features[:, : self.shape.chunk_size].to(self.std_logit.dtype)
            with torch.autocast(executed.device.type, enabled=False):
                logit = logit + self.std_net(executed).float()
        # a sigmoid has a gradient at the limits, which a clamp has not
        return (self.log_limits[0] + (self.log_limits[1] - self.log_limits[0]) * torch.sigmoid(logit)).exp()

    def _step(self, field: Field, x: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where the ODE's step leads, the deviation around it, and the pooled features."""
        step = torch.full((len(x),), number, device=x.device)
        velocity, features = field(x, time_of(step, self.shape.num_steps))
        return euler_step(x, velocity, self.shape.num_steps), self._std(number, features), self.shape.pool(features)

    def sample(self, field: Field, draws: Draws, explore: bool) -> Sampled:
        shape, x = self.shape, self._start(draws)
        path, log_prob, pooled = [x], _start_log_prob(shape.executed(x)), list[Tensor | None]()
        for number in range(shape.num_steps):
            x, std, features = self._step(field, x, number)
            mean = part = shape.executed(x)
            if explore:
                part = mean + std * draws.normal(shape.chunk_size, shape.action_dim, stream=_NOISE + number)
                x = shape.with_executed(x, part)
            log_prob = log_prob + gaussian_log_prob(part, mean, std)
            path.append(x)
            pooled.append(features)
        log_prob = log_prob / (shape.num_steps + 1)
        return Sampled(shape.executed(x), log_prob, _mean(pooled), {keys.FLOW_PATH: torch.stack(path, dim=1)})

    def recompute(self, field: Field, td: TensorDictBase) -> Recomputed:
        path, pooled = td[keys.FLOW_PATH].unbind(1), list[Tensor | None]()
        log_prob = _start_log_prob(self.shape.executed(path[0]))
        entropy = gaussian_entropy(torch.ones_like(log_prob))
        for number, (x, after) in enumerate(itertools.pairwise(path)):
            mean, std, features = self._step(field, x, number)
            log_prob = log_prob + gaussian_log_prob(self.shape.executed(after), self.shape.executed(mean), std)
            entropy = entropy + gaussian_entropy(std)
            pooled.append(features)
        terms = self.shape.num_steps + 1
        return Recomputed(log_prob / terms, entropy / terms, _mean(pooled))


def _start_log_prob(noise: Tensor) -> Tensor:
    return gaussian_log_prob(noise, torch.zeros_like(noise), torch.ones_like(noise))


def _mean(pooled: Sequence[Tensor | None]) -> Tensor | None:
    """The mean of the steps' features; None if the field has none."""
    given = [features for features in pooled if features is not None]
    return torch.stack(given).mean(0) if given else None
