"""Losses and diagnostics as pure functions, each per element. Nothing here averages: the trainer divides once."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "action", "chunk"]
"""What one element of the loss is: an element of an action, an action (one env step), or a whole chunk (one decision)."""

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8; beyond it the clipped branch meets inf * 0 in the backward pass


def reduce_to_level(elements: Tensor, executed: Tensor, level: Level) -> Tensor:
    """Sum action elements (log-probs, entropies) to the elements of a level; what was not executed counts zero.

    Args:
        elements: ``[B, H, A]``.
        executed: bool ``[B, H]``.
        level: see :data:`Level`.

    Returns:
        ``[B, H, A]`` at level ``token``, ``[B, H]`` at level ``action``, ``[B]`` at level ``chunk``.
    """
    # `where`, not a product: an element that was never executed may be NaN
    elements = torch.where(executed.unsqueeze(-1), elements, 0.0)
    if level == "token":
        return elements
    return elements.sum(-1) if level == "action" else elements.sum((-2, -1))


def valid_elements(executed: Tensor, action_dim: int, level: Level) -> Tensor:
    """Which elements of a level count: bool, of the shape that :func:`reduce_to_level` gives."""
    if level == "token":
        return executed.unsqueeze(-1).expand(*executed.shape, action_dim)
    return executed if level == "action" else executed.any(-1)


def per_decision(values: Tensor, like: Tensor) -> Tensor:
    """Shape one number per decision (``[B]`` or ``[B, 1]``) so that it broadcasts over the elements of ``like``."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """PPO's clipped policy loss, per element.

    Args:
        log_ratio: log-prob of the current policy minus that of the policy that the clip is centred on. Its magnitude is
            limited to ``LOG_RATIO_LIMIT``, so that no ratio overflows.
        advantage: broadcastable to ``log_ratio``.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        dual_clip: the largest ratio that counts where the advantage is negative (Ye et al., arXiv 1912.09729): without it
            the loss has no bound there. None for no such bound.
    """
    ratio = probability_ratio(log_ratio)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """The ratio per element, from its logarithm limited to ``LOG_RATIO_LIMIT``."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def is_clipped(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Bool per element: a clip of :func:`clipped_surrogate` took its gradient away."""
    ratio = probability_ratio(log_ratio)
    far_down = (ratio < 1.0 - clip_low) | (ratio > dual_clip) if dual_clip is not None else ratio < 1.0 - clip_low
    return ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & far_down)


Correction = Literal["none", "truncated_is", "decoupled", "vtrace"]
"""What is done about the age of the data. Three policies take part: the *behaviour* policy decided, the *proximal* one is
the trainer's at the start of the update, the *current* one is being trained. On fresh data all four choices are the same.

``none``: the ratio is current / behaviour, and clipped around the behaviour policy.
``truncated_is``: the same, but its old part, proximal / behaviour, counts ``importance_cap`` at most. This bounds the loss
of stale decisions with a negative advantage, and keeps their gradient.
``decoupled``: the ratio is current / proximal, clipped around the proximal policy, and the loss of each element is weighted
by proximal / behaviour, ``importance_cap`` at most (decoupled PPO, Hilton et al., arXiv 2110.00641). So no stale element
begins outside of the clip.
``vtrace``: as ``decoupled``, with V-trace's advantages and value targets in place of GAE's (see ``advantages.vtrace``).
"""


def correct(since_proximal: Tensor, age: Tensor, correction: Correction, cap: float) -> tuple[Tensor, Tensor]:
    """The log-ratio that is clipped and the weight of the clipped loss, per element, for every correction but ``none``.

    Args:
        since_proximal: log-prob of the current policy minus that of the proximal one.
        age: log-prob of the proximal policy minus that of the behaviour policy, without gradient.
        correction: see :data:`Correction`.
        cap: the largest weight.
    """
    capped = age.clamp(max=math.log(cap))
    if correction == "truncated_is":
        return since_proximal + capped, torch.ones_like(capped)
    return since_proximal, capped.exp()


def approx_kl(log_ratio: Tensor) -> Tensor:
    """An estimate of KL(behaviour || current) per element: (r - 1) - log r, never negative and unbiased.

    The "k3" estimator of J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def value_loss(
    value: Tensor, old_value: Tensor, target: Tensor, clip: float | None = None, huber_delta: float | None = None
) -> Tensor:
    """The critic's loss per decision: half the squared error, or Huber's loss, which equals it for small errors.

    Args:
        value: the critic's estimate now.
        old_value: its estimate when the decision was made.
        target: what it should be.
        clip: limit the estimate to ``old_value ± clip`` and take the larger loss of the two; None for no clip.
        huber_delta: error beyond which the loss grows linearly; None for the squared error everywhere.
    """

    def loss(estimate: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * (estimate - target) ** 2
        return torch.nn.functional.huber_loss(estimate, target, reduction="none", delta=huber_delta)

    if clip is None:
        return loss(value)
    return torch.maximum(loss(value), loss(old_value + (value - old_value).clamp(-clip, clip)))


def explained_variance(error: float, squared_error: float, target: float, squared_target: float) -> float:
    """1 - Var(error) / Var(target) from four means, which unlike the ratio can be summed over any split of a batch.

    Args:
        error: mean of ``target - value``.
        squared_error: mean of its square.
        target: mean of the target.
        squared_target: mean of its square.

    Returns:
        1 for a perfect critic, 0 for one that knows the mean only, NaN if the targets do not vary.
    """
    variance = squared_target - target**2
    return 1.0 - (squared_error - error**2) / variance if variance > 1e-12 else float("nan")
