"""``TrajectoryQueue``: finished slots on their way to the consumer, and free slots on their way back.

Free slots are what paces the rollouts: an env without one waits. So whoever holds slots back bounds how much is under way.
"""

from __future__ import annotations

import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.slab import Slab
from vla_async.collectors.wires import ALARM
from vla_async.shared_memory import Channel


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
        produced: slots that were finished.
        consumed: slots that were handed out and given back.
        dropped: slots that were thrown away, by reason.
    """

    def __init__(self, slab: Slab, board: Board, finished: Channel, free: Channel, check: Callable[[], None]) -> None:
        self.slab, self.board, self._finished, self._free, self._check = slab, board, finished, free, check
        self.produced, self.consumed, self.dropped = 0, 0, Counter[str]()
        self._ready: deque[int] = deque()
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
        """Finished slots that are neither consumed nor dropped."""
        return len(self) + len(self._held)

    def take(self, count: int, version: int, max_staleness: int | None = None) -> list[int]:
        """Wait for ``count`` finished slots, and hand them out.

        Args:
            count: how many.
            version: number of updates behind the consumer's weights.
            max_staleness: η: what the consumer gets is not older than ``version - η``, and neither will be what it gets
                after its next update: slots that would be, come first, and those still in progress are waited for. What is
                older all the same is dropped. None for no bound.

        Returns:
            The slots; none if another thread has ended the wait.

        Raises:
            Exception: what a process of the rollout has failed with.
        """
        while True:
            self._receive()
            if self.interrupted:
                return []
            if max_staleness is not None:
                self._drop_stale(version - max_staleness)
                if self._in_progress(version - max_staleness):
                    self._wait()
                    continue
            if len(self._ready) >= count:
                break
            self._wait()
        age = {slot: self.slab.oldest_version(slot) for slot in self._ready}
        taken = (
            sorted(self._ready, key=lambda slot: age[slot])[:count]
            if max_staleness is not None
            else list(self._ready)[:count]
        )
        for slot in taken:
            self._ready.remove(slot)
        self._held.update(taken)
        self.board.state[taken] = SlotState.HELD
        return taken

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

    def _in_progress(self, oldest: int) -> bool:
        """Whether a slot that is written to began with weights of this version or older."""
        acting = np.flatnonzero((self.board.state == SlotState.ACTING) | (self.board.state == SlotState.CLOSING))
        return any(self.slab.oldest_version(int(slot)) <= oldest for slot in acting)

    def _drop_stale(self, least: int) -> None:
        stale = [slot for slot in self._ready if self.slab.oldest_version(slot) < least]
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
            elif self.board.state[slot] == SlotState.DROPPED:
                self.dropped["worker ended"] += 1
                self.produced += 1
                self._set_free([slot])
            else:
                self.produced += 1
                self._ready.append(slot)

    def counts(self) -> dict[str, int]:
        """``produced``, ``consumed``, ``in_flight``, and ``dropped/<reason>``; the first is the sum of the others."""
        dropped = {f"dropped/{reason}": number for reason, number in self.dropped.items()}
        return {"produced": self.produced, "consumed": self.consumed, "in_flight": self.in_flight} | dropped
