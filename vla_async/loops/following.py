"""What a rank does that only trains: it follows rank 0 through the updates of a streaming fit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from vla_async.collectors.slab import Slab
from vla_async.loops.rollouts import read_dealt
from vla_async.monitor.timeline_track import Kind
from vla_async.rng import fold

if TYPE_CHECKING:
    from vla_async.loops.streaming import StreamingFitLoop
    from vla_async.trainer import AsyncTrainer


def follow(loop: StreamingFitLoop, trainer: AsyncTrainer) -> None:
    """Train on what rank 0 deals, update after update, until it says that it is enough.

    The order of the decisions in later epochs is drawn anew for each update, by its number: nothing has to be resumed.
    """
    rollouts = ReceivedRollouts(trainer)
    trainer.ranks.meeting = partial(trainer.timeline.span, Kind.MEET)
    while rollouts.begins():
        loop.shuffle_by(fold(trainer.seed, "shuffle", trainer.ranks.rank, rollouts.version))
        with trainer.timeline.step(rollouts.version + 1):
            loop.train_on(trainer, rollouts)
            trainer.objective.end_update()
        trainer.state.counters.step += 1


class ReceivedRollouts:
    """Rollouts as the other ranks have them: what rank 0 deals, read from its slab.

    Args:
        trainer: of this rank.

    Attributes:
        version: of the update that is under way.
        decisions: in it, of all ranks; known when all are dealt.
    """

    def __init__(self, trainer: AsyncTrainer) -> None:
        assert trainer.ranks.link is not None
        self._link, self.device, self.version, self.decisions = trainer.ranks.link, trainer.fabric.device, 0, 0
        _, layout, self._grouped = self._link.receive("slab")
        self._slab = Slab.attach(layout, self._link.receive(), self._link.receive())
        self._timeline = trainer.timeline
        self._timeline.receive(self._link, trainer.ranks.settings.num_ranks)
        if self.device.type == "cuda":
            self._slab.block.pin()

    def begins(self) -> bool:
        """Wait for the next update; False if there is none."""
        what, *version = self._link.receive("update", "stop")
        if what == "update":
            (self.version,) = version
        return bool(what == "update")

    def arrivals(self) -> Iterator[TensorDictBase]:
        """The trajectories of this rank, each (or each group) as soon as it is there."""
        while True:
            with self._timeline.span(Kind.WAIT):
                what, given = self._link.receive("take", "dealt")
            if what == "dealt":
                self.decisions = given
                return
            with self._timeline.reading(given):
                trajectories = read_dealt(self._slab, given, self.device, grouped=self._grouped, version=self.version)
            yield trajectories

    def collect(self) -> TensorDictBase | None:
        """The trajectories of this rank, ordered by env; None if there are none."""
        given = list(self.arrivals())
        return given[0] if given else None

    def trained(self) -> None:
        """Nothing; rank 0 takes the time."""
