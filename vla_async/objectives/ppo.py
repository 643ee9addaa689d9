"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347) for action chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.monitor import metric_table as names
from vla_async.monitor.metric import Family
from vla_async.objectives import losses
from vla_async.objectives.advantages import AdvantageNormalizer, GammaPer, gae, vtrace
from vla_async.objectives.base import StepOutput
from vla_async.objectives.clipped import ClippedObjective

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy

_INTERNAL = ("", "mean over valid loss elements", "What the explained variance is made of, and not logged itself.")
_MOMENTS = (  # of what the explained variance is made of
    Family("<objective>/error", *_INTERNAL),
    Family("<objective>/squared_error", *_INTERNAL),
    names.VALUE_TARGET,
    Family("<objective>/squared_value_target", *_INTERNAL),
)


@dataclass(kw_only=True)
class PPO(ClippedObjective):
    """PPO. The loss is a sum over the valid elements of one level, so one division makes it exact for any split.

    A decision's value loss counts once per valid element of that decision: at level ``chunk`` once, at the others in
    proportion to how much of the chunk was executed.

    Args:
        clip_low: the probability ratio is clipped at ``1 - clip_low``.
        clip_high: the probability ratio is clipped at ``1 + clip_high``.
        dual_clip: the largest ratio that counts where the advantage is negative (dual-clip PPO); None for no bound.
        level: what has one probability ratio: each element of an action (``token``), each action of the chunk
            (``action``), or the chunk as a whole (``chunk``).
        entropy_coef: weight of the entropy bonus, per element of the level.
        target_kl: end an update early when the mean ``ppo/approx_kl`` of an optimizer step exceeds it; None never. It is
            measured from the policy that the clip is centred on.
        correction: what is done about the age of the data: ``none``, ``truncated_is``, ``decoupled`` or ``vtrace``; see
            ``losses.Correction``.
        importance_cap: the largest weight that a correction gives; for ``vtrace`` it is also the bound on rho.
        trace_cap: for ``vtrace``, the bound on c, which says how far corrections reach back in time.
        gamma: discount factor.
        gamma_per: what one factor of gamma stands for. ``decision`` sums the rewards of a chunk undiscounted;
            ``env_step`` discounts each env step, whatever the chunk length.
        gae_lambda: decay of generalized advantage estimation, and of ``vtrace``, per decision.
        value_coef: weight of the critic's loss.
        value_clip: limit on how far the value may move from the old one, in units of return; None for no limit.
        huber_delta: value error beyond which the critic's loss grows linearly; None for a squared error.
        normalize_advantages: use the previous update's mean and deviation, see ``AdvantageNormalizer``.
        critic_warmup_updates: what a critic of fewer updates has valued trains the critic only; with data that is s updates
            old, these are the first so many updates and s more. After imitation the critic is untrained, and its first
            advantages would undo what the policy has learned.
    """

    prefix: ClassVar[str] = "ppo"
    corrections: ClassVar[tuple[losses.Correction, ...]] = ("none", "truncated_is", "decoupled", "vtrace")

    trace_cap: float = 1.0
    gamma: float = 0.99
    gamma_per: GammaPer = "decision"
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float | None = None
    huber_delta: float | None = None
    normalize_advantages: bool = True
    critic_warmup_updates: int = 0
    updates: int = field(default=0, init=False, repr=False, compare=False)
    normalizer: AdvantageNormalizer = field(default_factory=AdvantageNormalizer, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check = self._check
        cap = f"must be positive and at most objective.importance_cap={self.importance_cap}"
        check("trace_cap", 0.0 < self.trace_cap <= self.importance_cap, cap)
        check("gamma", 0.0 <= self.gamma <= 1.0, "must be in [0, 1]")
        check("gamma_per", self.gamma_per in ("decision", "env_step"), "is unknown: choose decision or env_step")
        check("gae_lambda", 0.0 <= self.gae_lambda <= 1.0, "must be in [0, 1]")
        check("value_coef", self.value_coef >= 0.0, "must not be negative")
        for name in ("value_clip", "huber_delta"):
            value = getattr(self, name)
            check(name, value is None or value > 0.0, "must be positive, or null to turn it off")
        check("critic_warmup_updates", self.critic_warmup_updates >= 0, "must not be negative")
        idle = self.critic_warmup_updates > 0 and self.value_coef == 0.0
        check("critic_warmup_updates", not idle, "would train nothing with objective.value_coef=0; raise value_coef")

    @property
    def warming_up(self) -> bool:
        """Whether this update trains the critic only, however fresh its data is."""
        return self.updates < self.critic_warmup_updates

    @torch.no_grad()
    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Add advantages and value targets to trajectories ``[N, T]`` (see :func:`gae`); call once for each of them.

        Raises:
            ValueError: if they have no time dimension, or V-trace finds no ``"proximal_log_prob"``.
        """
        discounting: dict[str, Any] = {"gamma": self.gamma, "gae_lambda": self.gae_lambda, "gamma_per": self.gamma_per}
        if self.correction == "vtrace":
            vtrace(trajectories, **discounting, rho_cap=self.importance_cap, c_cap=self.trace_cap)
        else:
            gae(trajectories, **discounting)
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
            RuntimeError: if the correction needs a proximal log-prob that the loop neither kept nor recomputed.
        """
        out = policy.evaluate(batch)
        if keys.VALUE not in out.keys():
            raise ValueError(f"PPO needs a critic, but {type(policy).__name__}.evaluate gives no {keys.VALUE!r}")
        trained = self._valued_well(batch)
        terms = self._policy_terms(out, batch, batch[keys.EXECUTED], trained)
        weight = terms.mask.flatten(1).sum(1) if terms.mask.ndim > 1 else terms.mask.to(torch.int64)
        old_value, target = (_used(batch[key], weight) for key in (keys.VALUE, keys.VALUE_TARGET))
        value = out[keys.VALUE].squeeze(-1)
        value_loss = (losses.value_loss(value, old_value, target, self.value_clip, self.huber_delta) * weight).sum()
        loss = self.value_coef * value_loss
        if trained is None or bool(
            trained.any()
        ):  # else nothing of the policy gets a gradient, not even of 0, which AdamW would decay it by
            loss = loss + terms.loss
        with torch.no_grad():
            error = target - old_value
            moments = zip(_MOMENTS, (error, error**2, target, target**2), strict=True)
            sums = {name: (moment * weight).sum() for name, moment in moments}
        return self._output(loss, terms, sums | {names.LOSS: loss, names.VALUE_LOSS: value_loss})

    def _valued_well(self, batch: TensorDictBase) -> Tensor | None:
        """Bool ``[B]``: whether the critic was trained enough when it valued a decision; None without a warm-up."""
        if self.critic_warmup_updates == 0:
            return None
        staleness = batch.get(keys.STALENESS, None)
        age = torch.zeros(len(batch), device=batch.device) if staleness is None else staleness.flatten()
        return self.updates - age >= self.critic_warmup_updates

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """Replace the moments of the value error by the explained variance of the values used in the rollout."""
        moments = [name.of(self.prefix) for name in _MOMENTS]
        dropped = {*moments} - {names.VALUE_TARGET.of(self.prefix)}
        rest = {name: value for name, value in means.items() if name not in dropped}
        variance = losses.explained_variance(*(means[name] for name in moments))
        return rest | {names.EXPLAINED_VARIANCE.of(self.prefix): variance}

    def sums(self) -> dict[str, float]:
        """What the advantage statistics of the next update are made of."""
        return self.normalizer.sums()

    def load_sums(self, sums: Mapping[str, float]) -> None:
        """The inverse of :meth:`sums`."""
        self.normalizer.load_sums(sums)

    def end_update(self) -> None:
        """Count the update, and make its advantage statistics those of the next one."""
        super().end_update()
        self.updates += 1
        self.normalizer.end_update()

    def reset(self) -> None:
        """Count updates from 0 again, which is when the critic warms up, and forget the advantage statistics."""
        super().reset()
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
