"""What PPO and GRPO share: a clipped probability ratio at one of three levels, and corrections for the age of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.monitor import metric_table as names
from vla_async.monitor.metric import Family
from vla_async.objectives import losses
from vla_async.objectives.base import Objective, ProximalNeed, StepOutput


class PolicyTerms(NamedTuple):
    """The part of a loss that concerns the policy, of one micro-batch.

    Attributes:
        loss: scalar, the clipped loss minus the entropy bonus, summed over the valid elements.
        mask: bool, which elements of the level are valid.
        num_samples: how many there are.
        metrics: family of names to (sum, count).
        kept: what later steps of the update need, see ``StepOutput.kept``.
    """

    loss: Tensor
    mask: Tensor
    num_samples: int
    metrics: dict[Family, tuple[Tensor, float]]
    kept: dict[str, Tensor]


@dataclass(kw_only=True)
class ClippedObjective(Objective):
    """An objective with a clipped probability ratio. Its settings are documented where a recipe names them."""

    prefix: ClassVar[str]  # of its metrics
    corrections: ClassVar[tuple[losses.Correction, ...]]

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    level: losses.Level = "chunk"
    entropy_coef: float = 0.0
    target_kl: float | None = None
    correction: losses.Correction = "none"
    importance_cap: float = 2.0
    stepped: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check = self._check
        check("clip_low", 0.0 < self.clip_low < 1.0, "must be between 0 and 1 (0.2 is usual)")
        check("clip_high", self.clip_high > 0.0, "must be positive (0.2 is usual)")
        check("dual_clip", self.dual_clip is None or self.dual_clip > 1.0, "must be above 1 (3 is usual), or null")
        check("level", self.level in ("token", "action", "chunk"), "is unknown: choose token, action or chunk")
        check("entropy_coef", self.entropy_coef >= 0.0, "must not be negative")
        check("target_kl", self.target_kl is None or self.target_kl > 0.0, "must be positive, or null to turn it off")
        choices = ", ".join(self.corrections[:-1]) + f" or {self.corrections[-1]}"
        check("correction", self.correction in self.corrections, f"cannot be used here: choose {choices}")
        check("importance_cap", self.importance_cap >= 1.0, "must be at least 1, which is the weight of fresh data")

    def _check(self, name: str, valid: bool, fix: str) -> None:
        if not valid:
            raise ValueError(f"objective.{name}={getattr(self, name)!r} {fix}")

    @property
    def needs_proximal(self) -> ProximalNeed:
        """By the correction; see :data:`~vla_async.objectives.base.ProximalNeed`."""
        if self.correction == "none":
            return "never"
        return "prepare" if self.correction == "vtrace" else "later_steps"

    def _proximal(self, batch: TensorDictBase, current: Tensor) -> Tensor | None:
        """The proximal log-prob ``[B, H, A]``; None if no one needs it and it is not known any more.

        Raises:
            RuntimeError: if the loss needs it and the loop has neither kept nor recomputed it.
        """
        stored: Tensor | None = batch.get(keys.PROXIMAL_LOG_PROB, None)
        if stored is not None:
            return stored
        if not self.stepped:
            return current.detach()
        if self.needs_proximal == "never":
            return None
        raise RuntimeError(
            f"objective.correction={self.correction!r} needs {keys.PROXIMAL_LOG_PROB!r} after an update's first optimizer "
            "step: keep StepOutput.kept with each micro-batch, or call objective.recompute on the batch before that step"
        )

    def _policy_terms(
        self, out: TensorDictBase, batch: TensorDictBase, executed: Tensor, trained: Tensor | None = None
    ) -> PolicyTerms:
        """The policy's loss on decisions ``[B]``.

        Args:
            out: what ``policy.evaluate`` gave.
            batch: with ``"action_log_prob"`` of the behaviour policy and ``"advantage"``.
            executed: bool ``[B, H]``, the actions that count.
            trained: bool ``[B]``, the decisions that add to the loss; all by default. The others count all the same.
        """
        current, behaviour = out[keys.LOG_PROB], batch[keys.LOG_PROB]
        proximal = self._proximal(batch, current)
        mask = losses.valid_elements(executed, behaviour.shape[-1], self.level)

        def difference(left: Tensor, right: Tensor) -> Tensor:
            return losses.reduce_to_level(left - right, executed, self.level)

        age = None if proximal is None else difference(proximal, behaviour)
        if proximal is None or age is None or self.correction == "none":
            log_ratio, weight = difference(current, behaviour), None
        else:
            log_ratio, weight = losses.correct(difference(current, proximal), age, self.correction, self.importance_cap)
        # what does not count may be NaN, and NaN * 0 is NaN
        advantage = torch.where(executed.any(-1), batch[keys.ADVANTAGE].squeeze(-1), 0.0)
        advantage = losses.per_decision(advantage, like=log_ratio)
        clip = (self.clip_low, self.clip_high, self.dual_clip)
        surrogate = losses.clipped_surrogate(log_ratio, advantage, *clip)
        adds = mask if trained is None else mask & losses.per_decision(trained, like=log_ratio)
        policy_loss = ((surrogate if weight is None else surrogate * weight) * adds).sum()
        entropy = (losses.reduce_to_level(out[keys.ENTROPY], executed, self.level) * adds).sum()
        count = float(mask.sum())
        with torch.no_grad():
            sums = {names.POLICY_LOSS: policy_loss, names.ENTROPY: entropy, names.ADVANTAGE: (advantage * mask).sum()}
            sums |= {names.APPROX_KL: losses.approx_kl(log_ratio).sum(), names.LOG_RATIO: log_ratio.abs().sum()}
            sums[names.RATIO] = (losses.probability_ratio(log_ratio) * mask).sum()
            sums[names.CLIP_FRACTION] = (losses.is_clipped(log_ratio, advantage, *clip) & mask).sum()
            metrics = {name: (total.detach(), count) for name, total in sums.items()}
            metrics |= self._age_metrics(age, mask, count)
        kept = {} if self.needs_proximal == "never" or proximal is None else {keys.PROXIMAL_LOG_PROB: proximal}
        return PolicyTerms(policy_loss - self.entropy_coef * entropy, mask, int(count), metrics, kept)

    def _age_metrics(self, age: Tensor | None, mask: Tensor, count: float) -> dict[Family, tuple[Tensor, float]]:
        """How far the proximal policy is from the behaviour policy; the count is 0 where that is unknown."""
        if age is None:
            return {names.LOG_PROB_GAP: (torch.zeros((), device=mask.device), 0.0)}
        metrics = {names.LOG_PROB_GAP: (age.abs().sum(), count)}
        if self.correction != "none":
            limit = math.log(self.importance_cap)
            metrics[names.IMPORTANCE_WEIGHT] = ((age.clamp(max=limit).exp() * mask).sum(), count)
            metrics[names.CAPPED_FRACTION] = ((age > limit).sum(), count)
        return metrics

    def _output(
        self, loss: Tensor, terms: PolicyTerms, sums: Mapping[Family, Tensor], kept: Mapping[str, Tensor] | None = None
    ) -> StepOutput:
        """What a micro-batch gives back: its terms, and more sums over the valid elements and tensors to keep."""
        more = {name: (total.detach(), float(terms.num_samples)) for name, total in sums.items()}
        metrics: dict[str, tuple[Tensor, float]] = {
            name.of(self.prefix): value for name, value in (terms.metrics | more).items()
        }
        return StepOutput(loss, terms.num_samples, metrics, terms.kept | dict(kept or {}))

    def ends_update(self, means: Mapping[str, float]) -> bool:
        """Whether the policy has moved further than ``target_kl`` from the one that the clip is centred on."""
        self.stepped = True
        return self.target_kl is not None and means[names.APPROX_KL.of(self.prefix)] > self.target_kl

    def end_update(self) -> None:
        """The next micro-batch sees the proximal policy of a new update."""
        self.stepped = False

    def reset(self) -> None:
        """Forget an update that did not come to its end."""
        self.stepped = False
