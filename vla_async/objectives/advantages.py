"""Advantages: GAE over decisions whose chunks execute a varying number of env steps, and a normaliser that streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from vla_async import keys

_SAME = 1e-6  # outcomes nearer than this differ by rounding

GammaPer = Literal["decision", "env_step"]
"""What one factor of gamma stands for.

``decision``: a decision's reward is the plain sum over its executed env steps, and the value after it counts gamma times.
``env_step``: the i-th executed env step counts gamma^i, and the value after the chunk gamma^n, where n env steps were
executed. The return of an episode then does not depend on how it was cut into chunks.
"""


def chunk_reward(step_rewards: Tensor, executed: Tensor, gamma: float, gamma_per: GammaPer) -> tuple[Tensor, Tensor]:
    """The reward of each decision and the discount of what follows it.

    Args:
        step_rewards: float ``[*B, H]``; what stands where nothing was executed is ignored.
        executed: bool ``[*B, H]``.
        gamma: discount factor.
        gamma_per: see :data:`GammaPer`.

    Returns:
        reward and discount, each ``[*B, 1]``.
    """
    rewards = torch.where(executed, step_rewards, 0.0)
    if gamma_per == "decision":
        return rewards.sum(-1, keepdim=True), torch.full_like(rewards[..., :1], gamma)
    number = executed.cumsum(-1)  # 1 at the first executed env step of the chunk
    discounts = torch.as_tensor(gamma, dtype=rewards.dtype, device=rewards.device)
    reward = (rewards * discounts ** (number - 1).clamp(min=0)).sum(-1, keepdim=True)
    return reward, discounts ** number[..., -1:]


def gae(
    trajectories: TensorDictBase, *, gamma: float, gae_lambda: float, gamma_per: GammaPer = "decision"
) -> TensorDictBase:
    """Write ``"advantage"`` and ``"value_target"`` into trajectories, by TorchRL's generalized advantage estimate.

    A terminated decision bootstraps nothing. A decision that is done but not terminated (the clock ran out) and the last
    one of a fragment bootstrap ``("next", "state_value")``, which must be the value of the observation that the chunk
    really ended on, not of the next episode's first. A trajectory may hold several episodes one after the other; no
    advantage flows from one into the one before. Lambda counts decisions in both modes of gamma.

    Args:
        trajectories: ``[N, T]`` with ``"state_value"``, ``("next", "state_value")``, ``("next", "step_rewards")``,
            ``("next", "executed")``, ``("next", "done")`` and ``("next", "terminated")``. A row that executed nothing is
            padding: its contents are ignored and it gets an advantage of zero.
        gamma: discount factor.
        gae_lambda: decay of the eligibility, per decision.
        gamma_per: what one factor of gamma stands for, see :data:`GammaPer`.

    Raises:
        ValueError: if the trajectories have no time dimension.
    """
    value, next_value, reward, discount, valid = _decisions(trajectories, gamma, gamma_per)
    # TorchRL's loop form takes a gamma per element, although annotated as a float; its vectorised form builds [N, T, T]
    done, terminated = trajectories[keys.DONE], trajectories[keys.TERMINATED]
    advantage, target = generalized_advantage_estimate(
        cast(float, discount), gae_lambda, value, next_value, reward, done, terminated
    )
    trajectories[keys.ADVANTAGE] = torch.where(valid, advantage, 0.0)
    trajectories[keys.VALUE_TARGET] = torch.where(valid, target, 0.0)
    return trajectories


def _decisions(trajectories: TensorDictBase, gamma: float, gamma_per: GammaPer) -> tuple[Tensor, ...]:
    """Value, next value (0 where nothing is bootstrapped), reward, discount and validity ``[N, T, 1]``; no padding shows."""
    check_trajectories(trajectories)
    executed = trajectories[keys.EXECUTED]
    valid, terminated = executed.any(-1, keepdim=True), trajectories[keys.TERMINATED]
    # what is not used may be uninitialised memory, and NaN * 0 is NaN
    value = torch.where(valid, trajectories[keys.VALUE], 0.0)
    next_value = torch.where(valid & ~terminated, trajectories[keys.NEXT_VALUE], 0.0)
    reward, discount = chunk_reward(trajectories[keys.STEP_REWARDS], executed, gamma, gamma_per)
    return value, next_value, reward, discount, valid


def check_trajectories(trajectories: TensorDictBase) -> None:
    """Refuse what has no time dimension.

    Raises:
        ValueError: unless the batch size is ``[N, T]``.
    """
    if len(trajectories.batch_size) != 2:
        raise ValueError(f"trajectories must be [N, T], but their batch size is {list(trajectories.batch_size)}")


def vtrace(
    trajectories: TensorDictBase,
    *,
    gamma: float,
    gae_lambda: float,
    gamma_per: GammaPer = "decision",
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
) -> TensorDictBase:
    """Write ``"advantage"`` and ``"value_target"`` by V-trace (Espeholt et al., arXiv 1802.01561) with lambda.

    The weight w of a decision is proximal / behaviour probability of what was executed of its chunk. Against
    :func:`gae`, with delta the one-step error, e the target minus the value, and e' that of the next decision::

        e = min(rho_cap, w) * delta + gamma * gae_lambda * min(c_cap, w) * e'
        advantage = delta + gamma * gae_lambda * e'

    On fresh data (w = 1) both are GAE's. The advantage is not yet weighted by rho: the loss does that, after
    normalisation. TorchRL's V-trace has no lambda, and its caller cannot pad.

    Args:
        trajectories: as for :func:`gae`, with ``"action_log_prob"`` and ``"proximal_log_prob"``.
        gamma: discount factor.
        gae_lambda: decay of the trace, per decision.
        gamma_per: what one factor of gamma stands for, see :data:`GammaPer`.
        rho_cap: bound on the weight of a one-step error; it decides what the targets converge to.
        c_cap: bound on the weight of the trace; it decides how fast.

    Raises:
        ValueError: if the trajectories have no time dimension or no ``"proximal_log_prob"``.
    """
    value, next_value, reward, discount, valid = _decisions(trajectories, gamma, gamma_per)
    if keys.PROXIMAL_LOG_PROB not in trajectories.keys():
        raise ValueError(f"V-trace needs {keys.PROXIMAL_LOG_PROB!r}; call objective.recompute before objective.prepare")
    log_prob = trajectories[keys.PROXIMAL_LOG_PROB] - trajectories[keys.LOG_PROB]
    log_weight = torch.where(trajectories[keys.EXECUTED].unsqueeze(-1), log_prob, 0.0).sum((-2, -1)).unsqueeze(-1)
    rho, c = (log_weight.clamp(max=math.log(cap)).exp() for cap in (rho_cap, c_cap))
    delta = reward + discount * next_value - value
    decay = discount * gae_lambda * ~trajectories[keys.DONE]
    advantage, excess = torch.empty_like(delta), torch.zeros_like(delta)
    following = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        advantage[:, t] = delta[:, t] + decay[:, t] * following
        following = excess[:, t] = rho[:, t] * delta[:, t] + decay[:, t] * c[:, t] * following
    trajectories[keys.ADVANTAGE] = torch.where(valid, advantage, 0.0)
    trajectories[keys.VALUE_TARGET] = torch.where(valid, value + excess, 0.0)
    return trajectories


def group_advantages(
    outcome: Tensor, group: Tensor, kept: Tensor, *, normalize_std: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """GRPO's advantage of each trajectory: its outcome against those of its group.

    Args:
        outcome: ``[N]``.
        group: int64 ``[N]``, equal for the members of a group.
        kept: bool ``[N]``; the others shift neither mean nor deviation, and get an advantage of 0.
        normalize_std: divide by the group's standard deviation (of the population) plus ``eps``.
        eps: see ``normalize_std``.

    Returns:
        advantages float64 ``[N]``, and bool ``[N]``: whether the kept outcomes of its group are all the same (to 1e-6),
        so that it says nothing about what is better.
    """
    _, index = torch.unique(group, return_inverse=True)
    outcome = torch.where(kept, outcome.to(torch.float64), 0.0)

    def total(x: Tensor) -> Tensor:
        """The sum over each member's group, for each member."""
        return torch.zeros_like(x).index_add_(0, index, x)[index]

    count = total(kept.to(torch.float64)).clamp(min=1.0)
    centred = torch.where(kept, outcome - total(outcome) / count, 0.0)
    spread = torch.zeros_like(centred).scatter_reduce_(0, index, centred.abs(), "amax")[index]
    scale = (total(centred**2) / count).sqrt() + eps if normalize_std else torch.ones_like(centred)
    equal = spread <= _SAME
    return torch.where(equal, 0.0, centred / scale), equal


class AdvantageNormalizer:
    """Normalises advantages with the mean and standard deviation of the *previous* update.

    The usual statistics, those of the batch itself, need the whole batch before the first backward pass, which would
    forbid training on trajectories while others still run. The previous update's are known when an update begins, so
    streaming and collecting first are the same algorithm, and the subtracted mean, being independent of the batch, is
    a constant baseline that leaves the policy gradient unbiased. The first update has no previous one and is left as it
    is (mean 0, deviation 1).

    The previous update can be unlike this one: when the first success of a sparse task arrives, the deviation is still
    that of failures. Hence the result is limited to ``[-limit, limit]``.

    Args:
        limit: largest magnitude of a normalised advantage, in standard deviations.
    """

    def __init__(self, limit: float = 10.0) -> None:
        self.limit = limit
        self.mean, self.std = 0.0, 1.0
        self._clear()

    def _clear(self) -> None:
        self._weight, self._sum, self._sum_of_squares = 0.0, 0.0, 0.0

    def __call__(self, advantage: Tensor) -> Tensor:
        """Normalise advantages of any shape by the statistics of the previous update."""
        return ((advantage - self.mean) / max(self.std, 1e-8)).clamp(-self.limit, self.limit)

    def update(self, advantage: Tensor, weight: Tensor) -> None:
        """Take raw advantages into the statistics that the next update will use.

        Args:
            advantage: any shape.
            weight: the same shape; how many loss elements each one stands for (or a mask).
        """
        weight = weight.to(torch.float64)
        advantage = torch.where(weight > 0, advantage.to(torch.float64), 0.0)
        sums = torch.stack([weight, weight * advantage, weight * advantage**2]).flatten(1).sum(1).tolist()
        self._weight, self._sum = self._weight + sums[0], self._sum + sums[1]
        self._sum_of_squares += sums[2]

    def sums(self) -> dict[str, float]:
        """What :meth:`update` has added up in this update."""
        return {"weight": self._weight, "sum": self._sum, "sum_of_squares": self._sum_of_squares}

    def load_sums(self, sums: Mapping[str, float]) -> None:
        """The inverse of :meth:`sums`."""
        self._weight, self._sum, self._sum_of_squares = sums["weight"], sums["sum"], sums["sum_of_squares"]

    def end_update(self) -> None:
        """Make what :meth:`update` saw the statistics in use; without any, keep the ones there are."""
        if self._weight > 0:
            self.mean = self._sum / self._weight
            self.std = math.sqrt(max(self._sum_of_squares / self._weight - self.mean**2, 0.0))
        self._clear()

    def state_dict(self) -> dict[str, float]:
        """The statistics in use. An unfinished update is left out: a resumed run repeats it from its start."""
        return {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.mean, self.std = float(state["mean"]), float(state["std"])
        self._clear()
