"""``DynamicBatcher``: which requests are answered together. A pure state machine; whoever drives it brings the clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Request = TypeVar("Request")


class Share(NamedTuple, Generic[Request]):
    """The part of a request that is in a batch.

    Attributes:
        request: what was put in.
        start: first row of the request that is in the batch.
        stop: end of its rows, exclusive.
    """

    request: Request
    start: int
    stop: int


@dataclass(slots=True)
class _Waiting(Generic[Request]):
    request: Request
    rows: int
    arrival: float
    start: int = 0  # rows before it have left already


class DynamicBatcher(Generic[Request]):
    """Groups requests into batches of at most ``max_batch_size`` rows, first come first served.

    A batch is due as soon as it is full, or when the oldest row has waited ``max_wait_s``. The wait is counted from that
    row's own arrival, however long nothing had arrived before it or a replica had been busy: after a long forward all that
    queued behind it is due at once. A request of several rows is cut where a batch is full; its rest keeps its arrival
    time and its place at the head.

    Between two calls nothing happens, so a driver waits for the next request or for :meth:`next_deadline`, whichever is
    first, and takes batches with :meth:`pop_due` while a replica is free. So driven with replicas that are always free, it
    agrees with :func:`vla_async.core_math.dynamic_batches` on every stream of arrivals.

    Args:
        max_batch_size: Bmax, in rows.
        max_wait_s: Tmax, in seconds; infinity waits for full batches, which can wait forever.

    Raises:
        ValueError: if ``max_batch_size < 1``, or ``max_wait_s`` is negative or NaN.
    """

    def __init__(self, max_batch_size: int, max_wait_s: float) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        if not max_wait_s >= 0.0:
            raise ValueError(f"max_wait_s={max_wait_s} must be 0 or a positive number of seconds")
        self.max_batch_size, self.max_wait_s = max_batch_size, max_wait_s
        self._queue: deque[_Waiting[Request]] = deque()
        self._rows = 0
        self._now = -math.inf

    def __len__(self) -> int:
        """Rows that wait."""
        return self._rows

    def put(self, request: Request, now: float, rows: int = 1) -> None:
        """Let a request wait.

        Args:
            request: anything; it comes back in the :class:`Share` of its batches.
            now: time in seconds, on any clock that does not run backwards.
            rows: how many rows it has.

        Raises:
            ValueError: if it has no rows, or the clock ran backwards.
        """
        self._advance(now)
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        self._queue.append(_Waiting(request, rows, now))
        self._rows += rows

    def pop_due(self, now: float) -> list[Share[Request]] | None:
        """Take the next batch if one is due; call again until there is none or no replica is free.

        Raises:
            ValueError: if the clock ran backwards.
        """
        self._advance(now)
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return None
        batch: list[Share[Request]] = []
        room = min(self.max_batch_size, self._rows)
        self._rows -= room
        while room:
            head = self._queue[0]
            taken = min(room, head.rows - head.start)
            batch.append(Share(head.request, head.start, head.start + taken))
            head.start += taken
            room -= taken
            if head.start == head.rows:
                self._queue.popleft()
        return batch

    def next_deadline(self) -> float | None:
        """When the next batch is due if nothing else arrives: minus infinity if it is full, None if nothing waits."""
        if not self._queue:
            return None
        return -math.inf if self._rows >= self.max_batch_size else self._queue[0].arrival + self.max_wait_s

    def _advance(self, now: float) -> None:
        if not now >= self._now:  # also refuses NaN
            raise ValueError(f"now={now} is before {self._now}: the clock must not run backwards")
        self._now = now
