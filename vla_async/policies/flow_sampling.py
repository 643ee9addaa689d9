"""The formulas of flow-matching policies, as pure functions.

The convention of the library: ``t`` runs from 1 (noise) to 0 (action) in K steps of ``1 / K``; on the way from an action
``x_0`` to noise ``x_1``, ``x_t = (1 - t) x_0 + t x_1`` and the velocity is ``v = x_1 - x_0``. A model that knows ``v`` also
knows the two ends that it expects, ``x_0 = x_t - t v`` and ``x_1 = x_t + (1 - t) v``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_async.rng import normal, uniform

_LOG_2PI = math.log(2.0 * math.pi)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Values ``[B]`` with as many dimensions as ``like`` ``[B, ...]``, so that they multiply its rows."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def time_of(step: Tensor, num_steps: int) -> Tensor:
    """The time that denoising step ``step`` (int64, from 0) starts from: float32, ``1 - step / K``."""
    return 1.0 - step.to(torch.float32) / num_steps


def interpolate(action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """``x_t`` between an action and noise, both ``[B, ...]``, at the times ``[B]``."""
    share = per_row(t, action)
    return (1.0 - share) * action + share * noise


def euler_step(x_t: Tensor, velocity: Tensor, num_steps: int) -> Tensor:
    """One step of the ODE: ``x_{t - 1/K}``, of the shape of ``x_t``."""
    return x_t - velocity / num_steps


def sde_moments(x_t: Tensor, velocity: Tensor, step: Tensor, num_steps: int, noise_level: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation of ``x_{t - 1/K}`` by one step of Flow-SDE (πRL, arXiv 2510.25889, section 4).

    The ODE's path gets noise of the scale ``σ_t = a sqrt(t / (1 - t))``, and a drift that takes as much of the old noise
    away: with ``δ = 1/K``, the mean is ``x_0 (1 - t + δ) + x_1 (t - δ - σ_t² δ / (2 t))`` and the variance ``σ_t² δ``.

    ``σ_t`` is infinite at ``t = 1``. There ``1 - t`` is replaced by ``δ``, its value at the next step, as in the method's
    public code: step ``k`` has the variance ``a² t / max(k, 1)``. Where the first step is the stochastic one, one time in K,
    the variance of the noise that is left after it is ``a² δ + a⁴ / 4`` larger than on the ODE's path.

    Args:
        x_t: ``[B, ...]``.
        velocity: of the same shape.
        step: int64 ``[B]``, which of the K steps it is, from 0.
        num_steps: K.
        noise_level: a.

    Returns:
        The mean, of the shape of ``x_t``, and the deviation, ``[B, 1, ...]``.
    """
    t, delta = per_row(time_of(step, num_steps), x_t), 1.0 / num_steps
    variance = noise_level**2 * t / per_row(step, x_t).clamp(min=1)
    action, noise = x_t - t * velocity, x_t + (1.0 - t) * velocity
    mean = action * (1.0 - t + delta) + noise * (t - delta - variance / (2.0 * t))
    return mean, variance.sqrt()


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of each element of ``x`` under a normal distribution; the arguments broadcast."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * _LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of a normal distribution, element by element."""
    return std.log() + 0.5 * (_LOG_2PI + 1.0)


@dataclass(frozen=True)
class Draws:
    """The random numbers of a batch of decisions: each row's come from its own request key.

    Attributes:
        rows: B.
        device: where the numbers are wanted.
        request_keys: int64 ``[B]``; None to draw from torch's global generator.
    """

    rows: int
    device: torch.device
    request_keys: Tensor | None

    def normal(self, *shape: int, stream: int) -> Tensor:
        """Standard normal numbers, float32 ``[B, *shape]``; draws of one decision differ by their ``stream``."""
        if self.request_keys is None:
            return torch.randn(self.rows, *shape, device=self.device)
        return normal(self.request_keys, *shape, stream=stream)

    def integer(self, below: int, stream: int) -> Tensor:
        """A number from 0 to ``below - 1`` for each row, int64 ``[B]``."""
        if self.request_keys is None:
            return torch.randint(below, (self.rows,), device=self.device)
        # a product can round up to `below`
        return (uniform(self.request_keys, stream=stream) * below).long().clamp(max=below - 1)
