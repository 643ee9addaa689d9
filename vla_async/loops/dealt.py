"""The trajectories of an update, dealt to several ranks: rank 0 takes them off the queue, and each reads its own.

::

   TrajectoryQueue ──slots──▶ DealtRollouts (rank 0) ──slots of each rank──▶ ReceivedRollouts (the other ranks)
                                                    Slab ──rows──▶ both

A bundle (a fragment, or a group whole) goes to the rank that has the fewest valid elements of this update so far, of equals
to the first. So who gets what depends on the order in which bundles are taken, not on how fast a rank is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.distributed.fsdp import FSDPModule

from vla_async import keys
from vla_async.collectors.fleet import Fleet
from vla_async.links import RankError
from vla_async.loops.rollouts import Rollouts, read_dealt
from vla_async.loops.slots import SlotPlan
from vla_async.monitor.timeline_track import Kind
from vla_async.weights.publisher import named_tensors

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class DealtRollouts(Rollouts):
    """Rollouts as rank 0 has them, which deals to all ranks, to itself too, and counts for all; arguments as there."""

    def __init__(self, fleet: Fleet, plan: SlotPlan, trainer: AsyncTrainer, *settings: Any) -> None:
        assert trainer.ranks.links is not None
        self._links, self._policy = trainer.ranks.links, trainer.policy
        self._inbox: queue.SimpleQueue[list[int] | BaseException] = queue.SimpleQueue()
        self._dealer: threading.Thread | None = None
        super().__init__(fleet, plan, trainer, *settings)
        self._links.tell("slab", fleet.slab.layout, plan.grouping is not None)
        self._links.share(fleet.slab.block)
        self._links.share(fleet.slab.lengths)
        trainer.timeline.share(self._links)
        trainer.ranks.meeting = partial(trainer.timeline.span, Kind.MEET)
        self._links.alarm = self._wake
        if self._links.trouble is not None:
            raise self._links.trouble

    def begin(self, version: int) -> None:
        """Begin the update that makes ``version + 1`` of ``version``."""
        super().begin(version)
        self._dealt = [0] * self._links.num_ranks  # valid elements of each rank

    def arrivals(self) -> Iterator[TensorDictBase]:
        """Those of rank 0, as soon as they are there; a thread deals to all ranks, whatever rank 0 computes."""
        self._links.tell("update", self.version)
        self._dealer = threading.Thread(target=self._deal, name="dealer", daemon=True)
        self._dealer.start()
        while slots := self._next():
            yield self._read(slots)
        self._dealer.join()

    def collect(self) -> TensorDictBase | None:
        """Those of rank 0, ordered by env; None if there are none."""
        self._links.tell("update", self.version)
        with self._pace.waiting(), self.timeline.span(Kind.WAIT):
            slots = self._choose(self.plan.bundles)
        own: list[list[int]] = [[] for _ in self._dealt]
        for bundle in self._bundles(slots):
            own[self._account_for(bundle)] += bundle
        for rank, given in enumerate(own):
            if rank and given:
                self._links.tell("take", given, rank=rank)
        self._links.tell("dealt", self.decisions)
        return self._read(own[0]) if own[0] else None

    def _deal(self) -> None:
        try:
            for number in range(self.plan.bundles):
                bundle = self._choose(1, earlier=number)
                rank = self._account_for(bundle)
                if rank == 0:
                    self._inbox.put(bundle)
                else:
                    self._links.tell("take", bundle, rank=rank)
            self._links.tell("dealt", self.decisions)
            self._inbox.put([])
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._inbox.put(error)

    def _next(self) -> list[int]:
        """The next slots of rank 0; none when all are dealt."""
        with self._pace.waiting(), self.timeline.span(Kind.WAIT):
            given = self._inbox.get()
        if isinstance(given, BaseException):
            raise given
        return given

    def _account_for(self, bundle: list[int]) -> int:
        """Count what a bundle holds; returns the rank that gets it."""
        slab = self.fleet.slab
        slots, steps = torch.tensor(bundle), torch.arange(slab.layout.decisions)
        rows = slots.unsqueeze(1) * slab.layout.rows_per_slot + steps
        there = steps < slab.length[slots].unsqueeze(1)
        executed = slab.rows(keys.EXECUTED[1:])[slab.next_rows(slots)] & there.unsqueeze(-1)
        versions = slab.rows((keys.POLICY_VERSION,))[rows]
        self._account(bundle, TensorDict({keys.EXECUTED: executed, keys.POLICY_VERSION: versions}, batch_size=rows.shape))
        rank = min(range(len(self._dealt)), key=self._dealt.__getitem__)
        self._dealt[rank] += int(executed.sum())
        return rank

    def _bundles(self, slots: Sequence[int]) -> list[list[int]]:
        """Slots that must stay together, in the order of their first ones."""
        if self.plan.grouping is None:
            return [[slot] for slot in slots]
        ids = self.fleet.slab.rows((keys.GROUP_ID,))[:: self.fleet.slab.layout.rows_per_slot, 0]
        together: dict[int, list[int]] = {}
        for slot in slots:
            together.setdefault(int(ids[slot]), []).append(slot)
        return list(together.values())

    def _read(self, slots: list[int]) -> TensorDictBase:
        grouped = self.plan.grouping is not None
        with self.timeline.reading(slots):
            return read_dealt(self.fleet.slab, slots, self.device, grouped=grouped, version=self.version)

    def _weights(self) -> Any:
        return named_tensors(self._policy) if isinstance(self._policy, FSDPModule) else None

    def snapshot(self) -> dict[str, Any]:
        """As there. In the middle of an update it is asked for by a run that is cut short: nothing is dealt any more."""
        self._stop_dealing()
        return super().snapshot()

    def _wake(self, trouble: RankError) -> None:
        """End every wait for trajectories."""
        self._inbox.put(trouble)
        with suppress(OSError):
            self.fleet.interrupt()

    def close(self) -> None:
        """End the thread that deals."""
        self._links.alarm = lambda trouble: None
        self._stop_dealing()

    def _stop_dealing(self) -> None:
        if self._dealer is not None and self._dealer.is_alive():
            self.fleet.interrupt()
            self._dealer.join()
