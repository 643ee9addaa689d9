"""``TrajectoryQueue``: finished slots on their way to the consumer, and free slots on their way back.

Free slots are what paces the rollouts: an env without one waits. So whoever holds slots back bounds how much is under way.
"""

from __future__ import annotations

import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from vla_async import keys
from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.slab import Slab
from vla_async.collectors.wires import ALARM
from vla_async.shared_memory import Channel

Straggler = Literal["wait", "cut", "drop"]
"""What becomes of a slot that is still written to when the bound on staleness asks for it: the consumer waits for it; it
ends with the decision that is being made, as a shorter fragment; or it ends so and is thrown away, and counted.
"""


class TrajectoryQueue:
    """Gives finished slots to the consumer, the oldest weights first, and takes them back.

    Every slot that was finished is consumed, dropped for a reason that is counted, or still here.

    Args:
        slab: the slots.
        board: shared bookkeeping.
        finished: slots that are complete, or dropped.
        free: slots that nobody has.
        check: raises what a process of the rollout has failed with, if one has.

    Attributes:
        produced: slots that were finished, or dropped because their worker ended.
        consumed: slots that were handed out and given back.
        dropped: slots that were thrown away, by reason.
        cut: slots that were ended early, because they would have become too old.
    """

    def __init__(self, slab: Slab, board: Board, finished: Channel, free: Channel, check: Callable[[], None]) -> None:
        self.slab, self.board, self._finished, self._free, self._check = slab, board, finished, free, check
        self.consumed, self.dropped = 0, Counter[str]()
        # the policy_version of each slot's first decision, which no later one is older than
        self._oldest = slab.rows((keys.POLICY_VERSION,)).numpy()[:: slab.layout.rows_per_slot, 0]
        self.produced, self.cut = 0, 0
        self._ready: deque[int] = deque()
        self._doomed: set[int] = set()  # in progress, to be dropped when they come
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self.interrupted = False

    def open(self) -> None:
        """Let the envs have all slots."""
        for slot in range(self.slab.layout.num_slots):
            self._free.send(slot)

    def __len__(self) -> int:
        """Finished slots that wait."""
        self._receive()
        return len(self._ready)

    @property
    def in_flight(self) -> int:
        """Finished slots that were taken in and are neither consumed nor dropped."""
        return len(self._ready) + len(self._held)

    def take(
        self,
        count: int,
        version: int,
        max_staleness: int | None = None,
        *,
        earlier: int = 0,
        later: int = 0,
        straggler: Straggler = "wait",
    ) -> list[int]:
        """Wait for ``count`` finished slots, and hand them out.

        Args:
            count: how many.
            version: number of updates behind the consumer's weights.
            max_staleness: η: nothing older than ``version - η`` is handed out, now or after the next updates: what would
                become too old is preferred, and waited for while it is in progress. What is too old all the same, as after a
                jump of the version, is dropped. None for no bound.
            earlier: how many slots were taken for the same update before.
            later: how many more will be.
            straggler: what happens to a slot in progress that is waited for; see :data:`Straggler`.

        Returns:
            The slots; none if another thread has ended the wait.

        Raises:
            Exception: what a process of the rollout has failed with.
        """
        while True:
            self._check()  # the alarm rings once, but whoever comes again must not wait for another
            self._receive()
            if self.interrupted:
                return []
            if max_staleness is not None:
                self._drop_stale(version - max_staleness)
            taken = self._choose(count, version, max_staleness, earlier, later)
            if taken:
                break
            if max_staleness is not None and straggler != "wait" and len(self._ready) >= count:
                self._end_stragglers(version, max_staleness, straggler)
            self._wait()
        for slot in taken:
            self._ready.remove(slot)
        self._held.update(taken)
        self.board.state[taken] = SlotState.HELD
        return taken

    def _choose(self, count: int, version: int, max_staleness: int | None, earlier: int = 0, later: int = 0) -> list[int]:
        """The slots to hand out, or none if it has to wait.

        A slot that began with weights o can be used until version o + η. Its turn comes in time, whatever finishes when, if
        after each batch at most j batches' worth of slots have to be used within the next j: the earliest deadline first.
        """
        if len(self._ready) < count:
            return []
        if max_staleness is None:
            return list(self._ready)[:count]
        age = {slot: self.slab.oldest_version(slot) for slot in self._ready}
        order = sorted(self._ready, key=age.__getitem__)  # of the same age, by arrival
        in_progress = self._ages_in_progress()
        left = [age[slot] for slot in order[count:]] + in_progress
        per_update = earlier + count + later
        for batches in range(max_staleness + 1):
            due = version + batches - max_staleness  # what began with these weights, or older ones, has to be used by then
            too_many = sum(oldest <= due for oldest in left) > batches * per_update + later
            if too_many and any(oldest <= due for oldest in in_progress):  # else, as after a jump, it is in vain to wait
                return []
        return order[:count]

    def release(self, slots: Sequence[int]) -> None:
        """Give back what was handed out: the envs may write there again."""
        self._held.difference_update(slots)
        self.consumed += len(slots)
        self._set_free(slots)

    def drop(self, slots: Sequence[int], reason: str) -> None:
        """Give back slots that were handed out but not used."""
        self._held.difference_update(slots)
        self.dropped[reason] += len(slots)
        self._set_free(slots)

    def recover(self, workers_claiming: Callable[[], bool]) -> None:
        """Find the slots that a worker had taken when it died, but not yet made known, and let the envs have them.

        Args:
            workers_claiming: whether a worker that lives is taking slots at this moment.
        """
        with self._lock:
            free = {slot for (slot,) in self._free.receive(self.slab.layout.num_slots)}
            # none is left to take, so what a living worker took before is known as soon as it is through
            while workers_claiming():
                threading.Event().wait(0.001)
            owned = set(self.board.slot.tolist())
            lost = {slot for slot in np.flatnonzero(self.board.state == SlotState.FREE).tolist() if slot not in free | owned}
            for slot in sorted(free | lost):
                self._free.send(slot)

    def _set_free(self, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                self.board.state[slot] = SlotState.FREE
                self._free.send(slot)

    def _ages_in_progress(self) -> list[int]:
        """The versions that the slots which are written to began with."""
        acting = np.flatnonzero((self.board.state == SlotState.ACTING) | (self.board.state == SlotState.CLOSING))
        return [self.slab.oldest_version(int(slot)) for slot in acting]

    def _end_stragglers(self, version: int, max_staleness: int, how: Straggler) -> None:
        """Let the slots in progress that have to be used first end with the decision that is being made."""
        for slot in np.flatnonzero(self.board.state == SlotState.ACTING).tolist():
            if self._oldest[slot] + max_staleness <= version and not self.board.cut[slot]:
                self.board.cut[slot] = True
                self.cut += how == "cut"
                if how == "drop":
                    self._doomed.add(slot)

    def _drop_stale(self, least: int) -> None:
        stale = [slot for slot in self._ready if self._oldest[slot] < least]
        for slot in stale:
            self._ready.remove(slot)
        if stale:
            self.drop(stale, "stale")

    def _wait(self) -> None:
        select.select([self._finished], [], [])

    def _receive(self) -> None:
        """Take in what has been finished, without waiting."""
        for (slot,) in self._finished.receive():
            if slot == ALARM:
                self._check()
                self.interrupted = True  # by another thread, to end the wait
                continue
            self.produced += 1
            if slot in self._doomed or self.board.state[slot] == SlotState.DROPPED:
                self.dropped["straggler" if slot in self._doomed else "worker ended"] += 1
                self._doomed.discard(slot)
                self._set_free([slot])
            else:
                self._ready.append(slot)

    def counts(self) -> dict[str, int]:
        """``produced``, ``consumed``, ``in_flight``, and ``dropped/<reason>``. Any thread may ask: nothing is taken in."""
        dropped = {f"dropped/{reason}": number for reason, number in self.dropped.items()}
        return {"produced": self.produced, "consumed": self.consumed, "in_flight": self.in_flight} | dropped

    def resume(self, counts: Mapping[str, int]) -> None:
        """Go on counting from what :meth:`counts` gave in an earlier run; what was in flight then is dropped."""
        self.produced, self.consumed = counts["produced"], counts["consumed"]
        dropped = {name.removeprefix("dropped/"): number for name, number in counts.items() if name.startswith("dropped/")}
        self.dropped = Counter(dropped) + Counter(resume=counts["in_flight"])

    def check_balance(self) -> None:
        """Make sure that nothing was lost or used twice.

        Raises:
            RuntimeError: if what was produced is not what was consumed, dropped, or is still here.
        """
        counts = self.counts()
        produced = counts.pop("produced")
        if produced != sum(counts.values()):
            raise RuntimeError(f"{produced} trajectories were produced, but {counts} do not add up to that")
