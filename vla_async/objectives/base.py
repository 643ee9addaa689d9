"""``Objective``: what turns trajectories into a loss. The loops know no other interface of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor

if TYPE_CHECKING:
    from vla_async.policies.base import VLAPolicy


class StepOutput(NamedTuple):
    """What one micro-batch gives back.

    Attributes:
        loss: scalar, the *sum* of the loss over the valid elements.
        num_samples: how many elements are valid; the trainer divides by their total once per optimizer step.
        metrics: name to (sum, count); the loop adds them up and logs sum / count once per step.
    """

    loss: Tensor
    num_samples: int
    metrics: Mapping[str, tuple[Tensor, Tensor | float]]


class Objective(ABC):
    """An algorithm, as the loops see it.

    An update calls :meth:`prepare` once per batch of trajectories, the objective itself once per micro-batch,
    :meth:`ends_update` after each optimizer step, and :meth:`end_update` once at its end.

    Nothing in :meth:`prepare` may depend on trajectories of the same update that have not arrived yet, so that the loss
    is the same whether an update is streamed or collected first.
    """

    @abstractmethod
    def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Add to trajectories ``[N, T]``, in place, what the loss needs beyond the rollout, for example advantages."""

    @abstractmethod
    def __call__(self, policy: VLAPolicy, batch: TensorDictBase) -> StepOutput:
        """The summed loss of a micro-batch of decisions ``[B]``."""

    def ends_update(self, means: Mapping[str, float]) -> bool:
        """Whether to skip the rest of this update, given the mean metrics of the last optimizer step."""
        return False

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turn mean metrics into what is logged: statistics that are no means are computed from means here."""
        return dict(means)

    def end_update(self) -> None:
        """Called once at the end of an update, before its weights are published."""

    def reset(self) -> None:
        """Forget what earlier runs left, for a new one begins."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, in plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
