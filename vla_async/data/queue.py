"""``TrajectoryQueue``: finished slots on their way to the consumer, and free slots on their way back.

Free slots are what paces the rollouts: an env without one waits. So whoever holds slots back bounds how much is under way.

What is handed out together is a *bundle*: one slot, or all slots of a group. A bundle can be used until the oldest decision
in it becomes too old, whether the rest of it has come or not. So a group that is incomplete when it has to be used is waited
for, like a slot that is still written to: its missing members have their slots, or are promised some, so they will come.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from vla_async import keys
from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.row_env import TASK
from vla_async.collectors.slab import UNANSWERED, Slab
from vla_async.collectors.wires import ALARM
from vla_async.data.counts import Reason, TrajectoryCounts
from vla_async.data.free_slots import FreeSlots
from vla_async.data.groups import GroupLedger
from vla_async.data.in_flight import Bundle
from vla_async.data.selection import Selection, Turns, choose
from vla_async.shared_memory import Channel

Straggler = Literal["wait", "cut", "drop"]
"""What becomes of a slot that is still written to when the bound on staleness asks for it: the consumer waits for it; it
ends with the decision that is being made, as a shorter fragment; or it ends so and is thrown away, and counted.
"""
_BEGUN = (SlotState.ACTING, SlotState.CLOSING, SlotState.FINISHED)


class TrajectoryQueue(TrajectoryCounts):
    """Gives finished slots to the consumer, in time and by preference, and takes them back.

    Every slot that was finished is consumed, dropped for a reason that is counted, or still here.

    Args:
        slab: the slots.
        board: shared bookkeeping.
        finished: slots that are complete, or dropped.
        free: slots that nobody has.
        check: raises what a process of the rollout has failed with, if one has.
        groups: says which slots belong together, and who may begin one; None where each slot is for itself.
    """

    def __init__(
        self,
        slab: Slab,
        board: Board,
        finished: Channel,
        free: Channel,
        check: Callable[[], None],
        groups: GroupLedger | None = None,
    ) -> None:
        super().__init__()
        self.slab, self.board, self._finished, self._check = slab, board, finished, check
        self._free, self._groups = FreeSlots(board, free), groups
        # the policy_version of each slot's first decision, which no later one is older than
        self._oldest = slab.rows((keys.POLICY_VERSION,)).numpy()[:: slab.layout.rows_per_slot, 0]
        self._turns = Turns()
        self._ready: deque[Bundle] = deque()
        self._doomed: set[int] = set()  # in progress, to be dropped when they come
        self._held: set[int] = set()
        self.interrupted = False

    def open(self, waiting: Sequence[Bundle] = ()) -> None:
        """Let the envs have all slots but those of bundles that are whole already, as after a resume."""
        used = [slot for bundle in waiting for slot in bundle]
        self._ready.extend(waiting)
        self.board.state[used] = SlotState.FINISHED
        self._free.give([slot for slot in range(self.slab.layout.num_slots) if slot not in {*used}])
        if self._groups is not None:
            self._groups.freed(self.slab.layout.num_slots // self._groups.grouping.size - len(waiting))

    def __len__(self) -> int:
        """Bundles that are whole, and wait."""
        self._receive()
        return len(self._ready)

    @property
    def in_flight(self) -> int:
        """Finished slots that were taken in and are neither consumed nor dropped."""
        waiting = 0 if self._groups is None else self._groups.waiting
        return sum(map(len, list(self._ready))) + waiting + len(self._held)

    def take(
        self,
        count: int,
        version: int,
        max_staleness: int | None = None,
        *,
        earlier: int = 0,
        later: int = 0,
        straggler: Straggler = "wait",
        selection: Selection = "oldest",
    ) -> list[int]:
        """Wait for ``count`` bundles (slots, or groups of slots), and hand out their slots.

        Args:
            count: how many.
            version: number of updates behind the consumer's weights.
            max_staleness: η: nothing older than ``version - η`` is handed out, now or after the next updates: what would
                become too old is preferred, and waited for while it is in progress. What is too old all the same, as after a
                jump of the version, is dropped. None for no bound.
            earlier: how many bundles were taken for the same update before.
            later: how many more will be.
            straggler: what happens to a slot in progress that is waited for; see :data:`Straggler`.
            selection: what is preferred where the bound leaves a choice; without a bound, what has arrived first is.

        Returns:
            The slots; none if another thread has ended the wait.

        Raises:
            Exception: what a process of the rollout has failed with.
        """
        while True:
            self._check()  # the alarm rings once, but whoever comes again must not wait for another
            self._receive()
            if self.interrupted:
                self._check()
                return []
            if max_staleness is not None:
                self._drop_stale(version - max_staleness)
            taken = self._choose(count, version, max_staleness, earlier, later, selection)
            if taken:
                break
            if max_staleness is not None and straggler != "wait" and len(self._ready) >= count:
                self._end_stragglers(version, max_staleness, straggler)
            self._wait()
        if selection == "balanced_tasks":
            self._turns.took([self._task_of(bundle) for bundle in taken])
        return self._hold(taken)

    def _hold(self, bundles: Sequence[Bundle]) -> list[int]:
        """Hand out what is ready."""
        for bundle in bundles:
            self._ready.remove(bundle)
        slots = [slot for bundle in bundles for slot in bundle]
        self._held.update(slots)
        self.board.state[slots] = SlotState.HELD
        return slots

    def _choose(
        self,
        count: int,
        version: int,
        max_staleness: int | None,
        earlier: int = 0,
        later: int = 0,
        selection: Selection = "oldest",
    ) -> list[Bundle]:
        """The bundles to hand out, or none if it has to wait."""
        if len(self._ready) < count:
            return []
        ready = list(self._ready)
        if max_staleness is None:
            return ready[:count]
        ages = [self._age(bundle) for bundle in ready]
        preferred = sorted(range(len(ready)), key=ages.__getitem__)  # of the same age, by arrival
        if selection == "freshest":
            preferred.sort(key=lambda number: -ages[number])
        elif selection == "balanced_tasks":
            preferred = self._turns.order([self._task_of(bundle) for bundle in ready], preferred)
        in_progress = list(self._ages_in_progress().values())
        bounds = {"version": version, "max_staleness": max_staleness, "earlier": earlier, "later": later}
        return [ready[number] for number in choose(ages, preferred, in_progress, count, **bounds)]

    def release(self, slots: Sequence[int]) -> None:
        """Give back what was handed out: the envs may write there again."""
        self._held.difference_update(slots)
        self.consumed += len(slots)
        self._give_back(slots)

    def drop(self, slots: Sequence[int], reason: Reason) -> None:
        """Give back slots that were handed out but not used."""
        self._held.difference_update(slots)
        self.dropped[reason] += len(slots)
        self._give_back(slots)

    def _give_back(self, bundles: Sequence[int]) -> None:
        """Let the envs have the slots of whole bundles."""
        number = len({self._bundle_of(slot) for slot in bundles})  # before others write there
        self._free.give(bundles)
        if self._groups is not None:
            self._groups.freed(number)

    def withhold(self, number: int) -> None:
        """Take slots out of circulation for good: those that nobody has at once, the others when they are given back.

        Args:
            number: how many; for groups, a multiple of their size.
        """
        if self._groups is None:
            self._free.withhold(number)
        else:
            self._groups.withhold(number // self._groups.grouping.size)

    def recover(self, workers_claiming: Callable[[], bool]) -> None:
        """Find the slots that a dead worker had just taken; see :meth:`FreeSlots.recover`."""
        self._free.recover(workers_claiming)

    def _age(self, slots: Iterable[int]) -> int:
        return min(int(self._oldest[slot]) for slot in slots)

    def _task_of(self, bundle: Bundle) -> bytes:
        """The task that all slots of a bundle are of, as the slab has it."""
        return self.slab.rows(TASK)[bundle[0] * self.slab.layout.rows_per_slot].numpy().tobytes()

    def _bundle_of(self, slot: int) -> int:
        """A name for the bundle that a slot in progress will be in."""
        return slot if self._groups is None else self._groups.id_of(slot)

    def _ages_in_progress(self) -> dict[int, int]:
        """The versions that the bundles began with of which something is still missing."""
        whole = {slot for bundle in self._ready for slot in bundle}
        ages: dict[int, int] = {}
        for slot in np.flatnonzero(np.isin(self.board.state, _BEGUN)).tolist():
            if slot not in whole:
                name = self._bundle_of(slot)
                ages[name] = min(ages.get(name, UNANSWERED), int(self._oldest[slot]))
        return ages

    def _end_stragglers(self, version: int, max_staleness: int, how: Straggler) -> None:
        """Let the slots in progress that have to be used first end with the decision that is being made."""
        ages = self._ages_in_progress()
        for slot in np.flatnonzero(self.board.state == SlotState.ACTING).tolist():
            age = ages.get(self._bundle_of(slot), UNANSWERED)  # it may have begun just now
            if age <= version - max_staleness and not self.board.cut[slot]:
                self.board.cut[slot] = True
                self.cut += how == "cut"
                if how == "drop":
                    self._doomed.add(slot)

    def _drop_stale(self, least: int) -> None:
        for bundle in [bundle for bundle in self._ready if self._age(bundle) < least]:
            self._ready.remove(bundle)
            self.drop(bundle, "stale")

    def _wait(self) -> None:
        select.select([self._finished], [], [])

    def _receive(self) -> None:
        """Take in what has been finished, without waiting."""
        for (slot,) in self._finished.receive():
            if slot == ALARM:
                self.interrupted = True  # by the supervisor, or by another thread, to end the wait
                continue
            self.produced += 1
            usable = slot not in self._doomed and self.board.state[slot] != SlotState.DROPPED
            own = (slot,) if usable else ()
            bundle = own if self._groups is None else self._groups.came_back(slot, usable=usable)
            if not usable:
                self.dropped["straggler" if slot in self._doomed else "worker ended"] += 1
                self._doomed.discard(slot)
                self._free.give([slot])
            if bundle:
                self._ready.append(bundle)
            elif bundle is not None and self._groups is not None:  # a whole group was lost
                self._groups.freed(1)

    def unconsumed(self) -> tuple[list[Bundle], int]:
        """What a checkpoint may save: takes in what has been finished, also where a process has failed.

        Returns:
            The bundles that are whole: those that are handed out, then those that wait. And how many slots are in progress,
            or dropped but not counted yet.
        """
        self._receive()
        held: dict[int, Bundle] = {}
        for slot in sorted(self._held):
            name = self._bundle_of(slot)
            held[name] = (*held.get(name, ()), slot)
        known = self.in_flight - len(self._held)
        begun = int(np.isin(self.board.state, (*_BEGUN, SlotState.DROPPED)).sum())
        return [*held.values(), *self._ready], begun - known
