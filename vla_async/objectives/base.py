"""``Objective``: what turns trajectories into a loss. The loops know no other interface of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy

ProximalNeed = Literal["never", "later_steps", "prepare"]
"""Where an objective needs ``"proximal_log_prob"``, the log-prob by the trainer's policy at the start of the update.

``never``: nowhere.
``later_steps``: in every micro-batch after the update's first optimizer step. Before that step the current policy *is* the
proximal one, so the loss needs no second forward pass and hands the log-prob on in ``StepOutput.kept``.
``prepare``: in the trajectories, before :meth:`Objective.prepare`.
"""


class StepOutput(NamedTuple):
    """What one micro-batch gives back.

    Attributes:
        loss: scalar, the *sum* of the loss over the valid elements.
        num_samples: how many elements are valid; the trainer divides by their total once per optimizer step.
        metrics: name to (sum, count); the loop adds them up and logs sum / count once per step.
        kept: key to tensor ``[B, ...]``: what the micro-batch must hold when it is trained on again in the same update
            (``batch.update(output.kept)``). Not written into it here, because a wrapped module sees a copy of its input.
    """

    loss: Tensor
    num_samples: int
    metrics: Mapping[str, tuple[Tensor, Tensor | float]]
    kept: Mapping[str, Tensor] = MappingProxyType({})


class Objective(ABC):
    """An algorithm, as the loops see it.

    An update calls :meth:`prepare` once per batch of trajectories, the objective itself once per micro-batch,
    :meth:`ends_update` after each optimizer step, and :meth:`end_update` once at its end.

    Nothing in :meth:`prepare` may depend on trajectories of the same update that have not arrived yet, so that the loss
    is the same whether an update is streamed or collected first.

    What :attr:`needs_proximal` asks for, :meth:`recompute` writes, with the weights of the start of the update. For
    ``prepare`` a loop calls it on all trajectories. For ``later_steps`` it may do the same; or it keeps what each
    micro-batch gave back in ``StepOutput.kept``, and recomputes only what is first trained on after the first optimizer
    step.

    Attributes:
        group_size: how many trajectories :meth:`prepare` must get together, because they share a ``"group_id"``.
        needs_whole_episodes: whether a trajectory must reach the end of its episode, so that it cannot be cut into
            fragments.
    """

    group_size: int = 1
    needs_whole_episodes: ClassVar[bool] = False

    @property
    def needs_proximal(self) -> ProximalNeed:
        """See :data:`ProximalNeed`."""
        return "never"

    @torch.no_grad()
    def recompute(self, policy: VLAPolicy, batch: TensorDictBase, micro_batch_size: int | None = None) -> None:
        """Write ``"proximal_log_prob"`` into a batch of any shape, by forward passes only.

        Args:
            policy: holds the weights of the start of the update: the policy in training before the update's first
                optimizer step, or a copy from then. Call it in the context that training steps run in (autocast).
            batch: decisions ``[*B]``.
            micro_batch_size: decisions per forward pass; all by default.
        """
        flat = batch.reshape(-1)
        parts = [policy.evaluate(part)[keys.LOG_PROB] for part in flat.split(micro_batch_size or len(flat))]
        log_prob = torch.cat(parts)
        batch[keys.PROXIMAL_LOG_PROB] = log_prob.reshape(*batch.batch_size, *log_prob.shape[1:])

    @abstractmethod
    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Add to trajectories ``[N, T]``, in place, what the loss needs beyond the rollout, for example advantages."""

    @abstractmethod
    def __call__(self, policy: VLAPolicy, batch: TensorDictBase) -> StepOutput:
        """The summed loss of a micro-batch of decisions ``[B]``."""

    def ends_update(self, means: Mapping[str, float]) -> bool:
        """Whether to skip the rest of this update, given the mean metrics of the last optimizer step.

        Called after each optimizer step, so it also tells the objective that there was one.
        """
        return False

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turn mean metrics into what is logged: statistics that are no means are computed from means here."""
        return dict(means)

    def end_update(self) -> None:
        """Called once at the end of an update, before its weights are published."""

    def begin_run(self, policy: VLAPolicy) -> None:
        """Called on each of several ranks before a run's first step, as none of them is sure to see data before it."""

    def sums(self) -> dict[str, float]:
        """Sums over what :meth:`prepare` has seen in this update; several ranks add them up before :meth:`end_update`."""
        return {}

    def load_sums(self, sums: Mapping[str, float]) -> None:
        """Put what :meth:`sums` gave, added up over all ranks, in the place of what this one has seen."""

    def reset(self) -> None:
        """Forget what earlier runs left, for a new one begins."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, in plain numbers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
