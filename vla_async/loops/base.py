"""``Loop``: the plug for how training runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vla_async.envs.base import EnvSpec

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

    stage: str

    def check(self, trainer: AsyncTrainer) -> None:
        """Refuse what cannot work, before any worker starts.

        Raises:
            ValueError: names the field, its value and the fix.
        """

    @abstractmethod
    def open(self, trainer: AsyncTrainer) -> EnvSpec:
        """Open the source of the data, and say what the policy will see."""

    @abstractmethod
    def run(self, trainer: AsyncTrainer) -> None:
        """Train until ``trainer.should_stop``; call ``trainer.end_step`` after each step.

        If ``trainer.state.loop`` is not empty, it is what this loop stored there: continue from it.
        """

    def live(self, trainer: AsyncTrainer) -> Mapping[str, float]:
        """How the update goes that is under way: some of the metrics that its end will log, as far as it is.

        Another thread asks for it again and again, at any time: it waits for nothing, takes nothing, and is cheap. Nothing
        where nothing runs, or where nothing can be told before the end.
        """
        return {}

    def close(self) -> None:
        """Release processes and files. Called on every kind of exit, also when :meth:`run` never started."""
