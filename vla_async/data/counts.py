"""``TrajectoryCounts``: what became of all trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

from vla_async.monitor import metric_table as names

Reason = Literal["stale", "straggler", "worker ended", "resume"]
"""Why a slot was thrown away: it was too old; it would have become so; its worker ended; a resumed run did not find it."""


class TrajectoryCounts(ABC):
    """Counts of slots, which must add up: what was produced was consumed, dropped for a reason, or is still in flight.

    Attributes:
        produced: slots that were finished, or dropped because their worker ended.
        consumed: slots that were handed out and given back.
        dropped: slots that were thrown away, by reason.
        cut: slots that were ended early, because they would have become too old.
    """

    def __init__(self) -> None:
        self.produced, self.consumed, self.dropped, self.cut = 0, 0, Counter[str](), 0

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Finished slots that were taken in and are neither consumed nor dropped."""

    def counts(self) -> dict[str, int]:
        """``produced``, ``consumed``, ``in_flight``, and ``dropped/<reason>``. Any thread may ask: nothing is taken in."""
        dropped = {f"dropped/{reason}": number for reason, number in self.dropped.items()}
        return {"produced": self.produced, "consumed": self.consumed, "in_flight": self.in_flight} | dropped

    def metrics(self) -> dict[str, int]:
        """What is logged: the same, and what was cut. A reason for which nothing was dropped counts 0."""
        return {
            names.PRODUCED: self.produced,
            names.CONSUMED: self.consumed,
            names.IN_FLIGHT: self.in_flight,
            names.CUT: self.cut,
            **{names.DROPPED.of(reason): self.dropped[reason] for reason in get_args(Reason)},
        }

    def resume(self, counts: Mapping[str, int]) -> None:
        """Go on counting from what :meth:`counts` gave in an earlier run; what was in flight and is not now is dropped."""
        self.produced, self.consumed = counts["produced"], counts["consumed"]
        dropped = {name.removeprefix("dropped/"): number for name, number in counts.items() if name.startswith("dropped/")}
        self.dropped = Counter(dropped) + Counter(resume=counts["in_flight"] - self.in_flight)

    def check_balance(self) -> None:
        """Make sure that nothing was lost or used twice.

        Raises:
            RuntimeError: if what was produced is not what was consumed, dropped, or is still here.
        """
        counts = self.counts()
        produced = counts.pop("produced")
        if produced != sum(counts.values()):
            raise RuntimeError(f"{produced} trajectories were produced, but {counts} do not add up to that")


def counts_when_saved(counts: Mapping[str, int], consumed: int, in_progress: int) -> dict[str, int]:
    """The counts that a run goes on with which is resumed from now, but from an earlier state of training.

    What has been consumed since that state was kept, by an update that it does not hold, and what is still in progress count
    as in flight: a resumed run drops what it does not find among the saved.

    Args:
        counts: of now, from :meth:`TrajectoryCounts.counts`.
        consumed: by that state.
        in_progress: slots that are not finished yet.
    """
    dropped = {name: number for name, number in counts.items() if name.startswith("dropped/")}
    produced = counts["produced"] + in_progress
    in_flight = produced - consumed - sum(dropped.values())
    return {"produced": produced, "consumed": consumed, "in_flight": in_flight} | dropped
