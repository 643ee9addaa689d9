"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347) for action chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.objectives import losses
from vla_async.objectives.advantages import AdvantageNormalizer, GammaPer, gae
from vla_async.objectives.base import Objective, StepOutput

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy

_MOMENTS = ("error", "squared_error", "value_target", "squared_value_target")


@dataclass(kw_only=True)
class PPO(Objective):
    """PPO. The loss is a sum over the valid elements of one level, so one division makes it exact for any split.

    A decision's value loss counts once per valid element of that decision: at level ``chunk`` once, at the others in
    proportion to how much of the chunk was executed.

    Args:
        clip_low: the probability ratio is clipped at ``1 - clip_low``.
        clip_high: the probability ratio is clipped at ``1 + clip_high``.
        gamma: discount factor.
        gamma_per: what one factor of gamma stands for. ``decision`` sums the rewards of a chunk undiscounted;
            ``env_step`` discounts each env step, whatever the chunk length.
        gae_lambda: decay of generalized advantage estimation, per decision.
        level: what has one probability ratio: each element of an action (``token``), each action of the chunk
            (``action``), or the chunk as a whole (``chunk``).
        value_coef: weight of the critic's loss.
        entropy_coef: weight of the entropy bonus, per element of the level.
        value_clip: limit on how far the value may move from the old one, in units of return; None for no limit.
        huber_delta: value error beyond which the critic's loss grows linearly; None for a squared error.
        normalize_advantages: use the previous update's mean and deviation, see ``AdvantageNormalizer``.
        target_kl: end an update early when the mean ``ppo/approx_kl`` of an optimizer step exceeds it; None never.
        critic_warmup_updates: the first so many updates train the critic only. After imitation the critic is untrained,
            and its first advantages would undo what the policy has learned.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    gamma: float = 0.99
    gamma_per: GammaPer = "decision"
    gae_lambda: float = 0.95
    level: losses.Level = "chunk"
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    value_clip: float | None = None
    huber_delta: float | None = None
    normalize_advantages: bool = True
    target_kl: float | None = None
    critic_warmup_updates: int = 0
    updates: int = field(default=0, init=False, repr=False, compare=False)
    normalizer: AdvantageNormalizer = field(default_factory=AdvantageNormalizer, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, fix: str) -> None:
            if not valid:
                raise ValueError(f"objective.{name}={getattr(self, name)!r} {fix}")

        check("clip_low", 0.0 < self.clip_low < 1.0, "must be between 0 and 1 (0.2 is usual)")
        check("clip_high", self.clip_high > 0.0, "must be positive (0.2 is usual)")
        check("gamma", 0.0 <= self.gamma <= 1.0, "must be in [0, 1]")
        check("gamma_per", self.gamma_per in ("decision", "env_step"), "is unknown: choose decision or env_step")
        check("gae_lambda", 0.0 <= self.gae_lambda <= 1.0, "must be in [0, 1]")
        check("level", self.level in ("token", "action", "chunk"), "is unknown: choose token, action or chunk")
        check("value_coef", self.value_coef >= 0.0, "must not be negative")
        check("entropy_coef", self.entropy_coef >= 0.0, "must not be negative")
        for name in ("value_clip", "huber_delta", "target_kl"):
            value = getattr(self, name)
            check(name, value is None or value > 0.0, "must be positive, or null to turn it off")
        check("critic_warmup_updates", self.critic_warmup_updates >= 0, "must not be negative")
        idle = self.critic_warmup_updates > 0 and self.value_coef == 0.0
        check("critic_warmup_updates", not idle, "would train nothing with objective.value_coef=0; raise value_coef")

    @property
    def warming_up(self) -> bool:
        """Whether this update trains the critic only."""
        return self.updates < self.critic_warmup_updates

    @torch.no_grad()
    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Add advantages and value targets to trajectories ``[N, T]`` (see :func:`gae`); call once for each of them."""
        gae(trajectories, gamma=self.gamma, gae_lambda=self.gae_lambda, gamma_per=self.gamma_per)
        if self.normalize_advantages:
            advantage, executed = trajectories[keys.ADVANTAGE], trajectories[keys.EXECUTED]
            # A is the same everywhere, so actions weigh as tokens do
            weight = executed.any(-1, keepdim=True) if self.level == "chunk" else executed.sum(-1, keepdim=True)
            self.normalizer.update(advantage, weight)
            trajectories[keys.ADVANTAGE] = torch.where(weight > 0, self.normalizer(advantage), 0.0)
        return trajectories

    def __call__(self, policy: VLAPolicy, batch: TensorDictBase) -> StepOutput:
        """The summed loss of decisions ``[B]`` that :meth:`prepare` has seen.

        Raises:
            ValueError: if the policy has no critic.
        """
        out = policy.evaluate(batch)
        if keys.VALUE not in out.keys():
            raise ValueError(f"PPO needs a critic, but {type(policy).__name__}.evaluate gives no {keys.VALUE!r}")
        executed = batch[keys.EXECUTED]
        mask = losses.valid_elements(executed, batch[keys.LOG_PROB].shape[-1], self.level)
        weight = mask.flatten(1).sum(1) if mask.ndim > 1 else mask.to(torch.int64)
        old_value, target, advantage = (_used(batch[key], weight) for key in (keys.VALUE, keys.VALUE_TARGET, keys.ADVANTAGE))
        log_ratio = losses.reduce_to_level(out[keys.LOG_PROB] - batch[keys.LOG_PROB], executed, self.level)
        entropy = losses.reduce_to_level(out[keys.ENTROPY], executed, self.level).sum()
        advantage = losses.per_decision(advantage, like=log_ratio)
        surrogate = losses.clipped_surrogate(log_ratio, advantage, self.clip_low, self.clip_high)
        policy_loss = (surrogate * mask).sum()
        value = out[keys.VALUE].squeeze(-1)
        value_loss = (losses.value_loss(value, old_value, target, self.value_clip, self.huber_delta) * weight).sum()
        loss = self.value_coef * value_loss
        if not self.warming_up:
            loss = loss + policy_loss - self.entropy_coef * entropy
        sums = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        with torch.no_grad():
            clipped = losses.is_clipped(log_ratio, advantage, self.clip_low, self.clip_high) & mask
            sums |= {"approx_kl": losses.approx_kl(log_ratio).sum(), "clip_fraction": clipped.sum()}
            sums |= {"log_ratio": log_ratio.abs().sum(), "advantage": (advantage * mask).sum()}
            error = target - old_value
            moments = zip(_MOMENTS, (error, error**2, target, target**2), strict=True)
            sums |= {name: (moment * weight).sum() for name, moment in moments}
        count = int(mask.sum())
        return StepOutput(loss, count, {f"ppo/{name}": (total.detach(), float(count)) for name, total in sums.items()})

    def ends_update(self, means: Mapping[str, float]) -> bool:
        """Whether the policy has moved further than ``target_kl`` from the behaviour policy."""
        return self.target_kl is not None and means["ppo/approx_kl"] > self.target_kl

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """Replace the moments of the value error by the explained variance of the values used in the rollout."""
        moments = [means[f"ppo/{name}"] for name in _MOMENTS]
        dropped = {f"ppo/{name}" for name in _MOMENTS} - {"ppo/value_target"}
        rest = {name: value for name, value in means.items() if name not in dropped}
        return rest | {"ppo/explained_variance": losses.explained_variance(*moments)}

    def end_update(self) -> None:
        """Count the update, and make its advantage statistics those of the next one."""
        self.updates += 1
        self.normalizer.end_update()

    def reset(self) -> None:
        """Count updates from 0 again, which is when the critic warms up, and forget the advantage statistics."""
        self.updates, self.normalizer = 0, AdvantageNormalizer()

    def state_dict(self) -> dict[str, Any]:
        """The number of finished updates and the advantage statistics."""
        return {"updates": self.updates, "normalizer": self.normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.updates = int(state["updates"])
        self.normalizer.load_state_dict(state["normalizer"])


def _used(values: Tensor, weight: Tensor) -> Tensor:
    """``[B, 1]`` to ``[B]``, with zeros for decisions that do not count: what those hold may be NaN, and NaN * 0 is NaN."""
    return torch.where(weight > 0, values.squeeze(-1), 0.0)
