"""Group-relative policy optimisation (Shao et al., arXiv 2402.03300) for action chunks: no critic, no bootstrap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.monitor import metric_table as names
from vla_async.objectives import losses
from vla_async.objectives.advantages import check_trajectories, group_advantages
from vla_async.objectives.base import StepOutput
from vla_async.objectives.clipped import ClippedObjective
from vla_async.objectives.reference import Reference

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy

Outcome = Literal["return", "success_once", "success_at_end"]
"""What is compared within a group: the sum of the executed env steps' rewards, or one of the two successes as 0 or 1."""


@dataclass(kw_only=True)
class GRPO(ClippedObjective):
    """GRPO. An episode's advantage is its outcome against those of its group, which began in the same state.

    The loss is a sum over the valid elements of one level, divided once by their number: a long episode counts more than
    a short one, and the mean over a batch does not depend on how it was cut.

    Args:
        group_size: episodes per group, which share a ``"group_id"`` and arrive together. A group may have lost members.
        outcome: what is compared: the ``return`` (undiscounted), ``success_once`` or ``success_at_end``.
        normalize_std: divide advantages by the group's standard deviation. Without it, groups that nearly always fail or
            succeed don't weigh more than others (Dr. GRPO, arXiv 2503.20783).
        std_eps: added to that deviation.
        filter_equal_groups: leave groups out of the loss whose outcomes are all the same (DAPO's dynamic sampling, arXiv
            2503.14476). Otherwise they count as elements with an advantage of 0.
        kl_coef: weight of the KL divergence from the policy at the start of the run, by the "k3" estimator; 0 for none.
        clip_low: the probability ratio is clipped at ``1 - clip_low``.
        clip_high: the probability ratio is clipped at ``1 + clip_high``; higher than ``clip_low`` for DAPO.
        dual_clip: the largest ratio that counts where the advantage is negative; None for no bound.
        level: what has one probability ratio: each element of an action (``token``), each action of the chunk
            (``action``), or the chunk as a whole (``chunk``).
        entropy_coef: weight of the entropy bonus, per element of the level.
        target_kl: end an update early when the mean ``grpo/approx_kl`` of an optimizer step exceeds it; None never.
        correction: what is done about the age of the data: ``none``, ``truncated_is`` or ``decoupled``; see
            ``losses.Correction``.
        importance_cap: the largest weight that a correction gives.
    """

    prefix: ClassVar[str] = "grpo"
    corrections: ClassVar[tuple[losses.Correction, ...]] = ("none", "truncated_is", "decoupled")
    needs_whole_episodes: ClassVar[bool] = True

    group_size: int = 8
    outcome: Outcome = "return"
    normalize_std: bool = True
    std_eps: float = 1e-6
    filter_equal_groups: bool = True
    kl_coef: float = 0.0
    reference: Reference | None = field(default=None, init=False, repr=False, compare=False)
    seen: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    counts: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check = self._check
        check("group_size", self.group_size >= 2, "must be at least 2: an episode alone has nothing to compare with")
        choices = ("return", "success_once", "success_at_end")
        check("outcome", self.outcome in choices, "is unknown: choose return, success_once or success_at_end")
        check("std_eps", self.std_eps > 0.0, "must be positive (1e-6 is usual)")
        check("kl_coef", self.kl_coef >= 0.0, "must not be negative")

    @torch.no_grad()
    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Add ``"advantage"`` and ``"loss_mask"`` to whole groups ``[N, T]``, one episode per row, padded at its end.

        An episode that did not reach its end, or whose ``"loss_mask"`` is false already, counts neither in its group's
        mean nor in the loss.

        Raises:
            ValueError: if a row holds more than one episode, if a group has more than ``group_size`` members, or if one
                arrives in parts.
        """
        check_trajectories(trajectories)
        valid = trajectories[keys.EXECUTED].any(-1)
        done = trajectories[keys.DONE].squeeze(-1) & valid
        if bool((valid[:, 1:] & (done.cumsum(1) > 0)[:, :-1]).any()):
            raise ValueError("GRPO needs one episode per row, but a row goes on after its episode's end")
        group = trajectories[keys.GROUP_ID][:, 0, 0]
        self._check_groups(group)
        mask = valid & trajectories[keys.LOSS_MASK].squeeze(-1) if keys.LOSS_MASK in trajectories.keys() else valid
        kept = done.any(1) & mask.any(1)
        outcome = self._outcomes(trajectories, valid, done)
        advantage, equal = group_advantages(outcome, group, kept, normalize_std=self.normalize_std, eps=self.std_eps)
        trained = kept & ~equal if self.filter_equal_groups else kept
        mask = mask & trained.unsqueeze(1)
        trajectories[keys.LOSS_MASK] = mask.unsqueeze(-1)
        trajectories[keys.ADVANTAGE] = torch.where(mask, advantage.to(torch.float32).unsqueeze(1), 0.0).unsqueeze(-1)
        self._count(group, equal, kept, outcome)
        return trajectories

    def _check_groups(self, group: Tensor) -> None:
        ids, sizes = (x.tolist() for x in group.unique(return_counts=True))
        for name, size in zip(ids, sizes, strict=True):
            if size > self.group_size:
                raise ValueError(f"group {name} has {size} trajectories, but objective.group_size={self.group_size}")
        again = self.seen & set(ids)
        if again:
            raise ValueError(f"group {min(again)} arrived in parts; hand it over whole, for its mean is the baseline")
        self.seen |= set(ids)

    def _outcomes(self, trajectories: TensorDictBase, valid: Tensor, done: Tensor) -> Tensor:
        """The outcome ``[N]`` of each row, whatever padding holds."""
        if self.outcome == "return":
            rewards = torch.where(trajectories[keys.EXECUTED], trajectories[keys.STEP_REWARDS], 0.0)
            return rewards.to(torch.float64).sum((1, 2))
        # once: it held at some decision; at the end: it held at the one that ended the episode
        key, where = (keys.SUCCESS_ONCE, valid) if self.outcome == "success_once" else (keys.SUCCESS, done)
        success: Tensor = trajectories[key].squeeze(-1)
        return (where & success).any(1).to(torch.float64)

    def _count(self, group: Tensor, equal: Tensor, kept: Tensor, outcome: Tensor) -> None:
        news = {
            "groups": float(len(group.unique())),
            "equal_groups": float(len(group[equal].unique())),
            "trajectories": float(len(group)),
            "kept_trajectories": float(kept.sum()),
            "outcome": float(torch.where(kept, outcome, 0.0).sum()),
        }
        self.counts = {name: self.counts.get(name, 0.0) + value for name, value in news.items()}

    def __call__(self, policy: VLAPolicy, batch: TensorDictBase) -> StepOutput:
        """The summed loss of decisions ``[B]`` that :meth:`prepare` has seen.

        Raises:
            RuntimeError: if the correction needs a proximal log-prob that the loop neither kept nor recomputed.
            ValueError: if ``kl_coef`` is set and the policy's weights are sharded.
        """
        out = policy.evaluate(batch)
        executed = batch[keys.EXECUTED] & batch[keys.LOSS_MASK]
        terms = self._policy_terms(out, batch, executed)
        if self.kl_coef == 0.0:
            return self._output(terms.loss, terms, {names.LOSS: terms.loss})
        reference = self._reference_log_prob(policy, batch)
        # masked before the exponential: the gradient of a masked NaN would be NaN
        away = losses.reduce_to_level(reference - out[keys.LOG_PROB], executed, "token")
        kl = losses.approx_kl(away).sum()
        loss = terms.loss + self.kl_coef * kl
        return self._output(loss, terms, {names.LOSS: loss, names.REFERENCE_KL: kl}, {keys.REFERENCE_LOG_PROB: reference})

    def _reference_log_prob(self, policy: VLAPolicy, batch: TensorDictBase) -> Tensor:
        """What the batch holds, or what the policy thought when this was first called, before the run's first step."""
        stored: Tensor | None = batch.get(keys.REFERENCE_LOG_PROB, None)
        if stored is not None:
            return stored
        if self.reference is None:
            self.reference = Reference.of(policy)
        return self.reference.log_prob(policy, batch)

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """Add the groups of this update, how many of them had equal outcomes, and the episodes that were left out."""
        counts = dict.fromkeys(("groups", "equal_groups", "trajectories", "kept_trajectories"), 0.0) | self.counts
        kept = counts["kept_trajectories"]
        news = {names.GROUPS: counts["groups"], names.EQUAL_GROUPS: counts["equal_groups"]}
        news[names.UNFINISHED] = counts["trajectories"] - kept
        if kept:
            news[names.OUTCOME] = counts["outcome"] / kept
        return dict(means) | {name.of(self.prefix): value for name, value in news.items()}

    def begin_run(self, policy: VLAPolicy) -> None:
        """Copy the reference policy, if there is to be one."""
        if self.kl_coef > 0.0 and self.reference is None:
            self.reference = Reference.of(policy)

    def sums(self) -> dict[str, float]:
        """How many groups and episodes there were, and what came of them."""
        return dict(self.counts)

    def load_sums(self, sums: Mapping[str, float]) -> None:
        """The inverse of :meth:`sums`."""
        self.counts = dict(sums)

    def end_update(self) -> None:
        """Forget the groups of this update."""
        super().end_update()
        self.seen, self.counts = set(), {}

    def reset(self) -> None:
        """Let the next run's first policy be the reference."""
        super().reset()
        self.seen, self.counts, self.reference = set(), {}, None

    def state_dict(self) -> dict[str, Any]:
        """The reference policy's weights, if there are any."""
        return {"reference": None if self.reference is None else dict(self.reference.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.reference = None if state["reference"] is None else Reference(state["reference"])
