"""``FreeSlots``: the slots that nobody has, on their way to the envs. How many there are is what paces the rollouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from vla_async.collectors.board import Board, SlotState
from vla_async.shared_memory import Channel


class FreeSlots:
    """Hands slots to the envs, and takes some out of circulation.

    Args:
        board: shared bookkeeping.
        channel: slots that nobody has.
    """

    def __init__(self, board: Board, channel: Channel) -> None:
        self.board, self._channel = board, channel
        self._to_withhold = 0
        self._lock = threading.Lock()

    def give(self, slots: Sequence[int]) -> None:
        """Let the envs have some slots, except as many as are to be withheld."""
        # lists: NumPy would take a tuple for an index per dimension
        withheld, free = list(slots[: self._to_withhold]), list(slots[self._to_withhold :])
        self._to_withhold -= len(withheld)
        self.board.state[withheld] = SlotState.WITHHELD
        with self._lock:
            # all of them first: lockstep waits for an env without a slot only while there is one for it
            self.board.owner[free], self.board.state[free] = -1, SlotState.FREE
            for slot in free:
                self._channel.send(slot)

    def withhold(self, number: int) -> None:
        """Take so many slots out of circulation for good: those that nobody has at once, the others when they come back."""
        if not number:
            return
        with self._lock:
            slots = [slot for (slot,) in self._channel.receive(number)]
            self.board.state[slots] = SlotState.WITHHELD
        self._to_withhold += number - len(slots)

    def recover(self, workers_claiming: Callable[[], bool]) -> None:
        """Find the slots that a worker had taken when it died, but not yet made known, and let the envs have them.

        Args:
            workers_claiming: whether a worker that lives is taking slots at this moment.
        """
        with self._lock:
            free = {slot for (slot,) in self._channel.receive(len(self.board.state))}
            # none is left to take, so what a living worker took before is known as soon as it is through
            while workers_claiming():
                threading.Event().wait(0.001)
            nobodys = np.flatnonzero((self.board.state == SlotState.FREE) & (self.board.owner < 0))
            lost = set(nobodys.tolist()) - free
            for slot in sorted(free | lost):
                self._channel.send(slot)
