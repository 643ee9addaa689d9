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
    if len(trajectories.batch_size) != 2:
        raise ValueError(f"trajectories must be [N, T], but their batch size is {list(trajectories.batch_size)}")
    executed = trajectories[keys.EXECUTED]
    valid, terminated = executed.any(-1, keepdim=True), trajectories[keys.TERMINATED]
    # what is not used may be uninitialised memory, and NaN * 0 is NaN
    value = torch.where(valid, trajectories[keys.VALUE], 0.0)
    next_value = torch.where(valid & ~terminated, trajectories[keys.NEXT_VALUE], 0.0)
    reward, discount = chunk_reward(trajectories[keys.STEP_REWARDS], executed, gamma, gamma_per)
    # TorchRL's loop form takes a gamma per element, although annotated as a float; its vectorised form builds [N, T, T]
    advantage, target = generalized_advantage_estimate(
        cast(float, discount), gae_lambda, value, next_value, reward, trajectories[keys.DONE], terminated
    )
    trajectories[keys.ADVANTAGE] = torch.where(valid, advantage, 0.0)
    trajectories[keys.VALUE_TARGET] = torch.where(valid, target, 0.0)
    return trajectories


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
