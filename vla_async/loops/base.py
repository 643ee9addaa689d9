"""``Loop``: the plug for how training runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class Loop(ABC):
    """Owns the data of one kind of training and carries it out on a trainer.

    The trainer has set up the policy and its optimizer before :meth:`run`. The docstring of each loop has four lines:

        Consumes: what it takes in.
        Waits for: what can hold it up.
        Produces: what it hands on.
        Unblocked by: who ends the wait.
    """

    @abstractmethod
    def run(self, trainer: AsyncTrainer) -> None:
        """Train until ``trainer.should_stop``. Opens what it needs and leaves it to :meth:`close`."""

    def close(self) -> None:
        """Release processes and files. Called on every kind of exit, also when :meth:`run` never started."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the loop: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; called before :meth:`run`."""
