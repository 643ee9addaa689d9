"""The hand-overs between env workers, replicas and the consumer: which channels there are, and what their records say.

::

   EnvWorker ──asks: decide for an env; finish a slot, whose end may want a value──▶ InferenceReplica
       ▲  ▲                                                                           │      │
       │  └──────────────────────────── answers ◀─────────────────────────────────────┘      │
       └──── free slots ◀──── TrajectoryQueue ◀──── finished (and dropped) slots ◀───────────┘
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vla_async.shared_memory import Channel

clock = time.monotonic
"""The clock of all processes of a machine, in seconds: requests are stamped by their worker and timed by their replica."""


class Ask(IntEnum):
    """What a record in a replica's channel asks for. An env is named by its first row."""

    DECIDE = 0  # for the env ``id``
    FINISH = 1  # the slot ``id``
    FORGET = 2  # the env ``id``: its worker has ended
    WEIGHTS = 3  # look for newer ones
    PAUSE = 4  # answer nothing
    RESUME = 5
    STOP = 6
    HUNGRY = 8  # the env ``id`` waits for a slot; told in lockstep only
    ABSENT = 7  # the env ``id`` has no episode to play, so lockstep must not wait for it


DECIDE = int(Ask.DECIDE)  # by far the most frequent; as a plain number, for a member of an enum is found by slow code
ASK_RECORD = "<hhid"  # Ask, generation of the worker, id, clock when it was sent
ANSWER_RECORD = "<hhi"  # generation of the worker, env within the worker, rows answered; 0 lets it start the env
SLOT_RECORD = "<i"
ACK_RECORD = "<iqq"  # replica, version, checksum
STOPPED = -1  # as a generation in an answer: the worker has to end
ADMITTED = -2  # as a generation in an answer: some rows may begin an episode, as the board says
ALARM = -1  # as a finished slot, or as a replica that acknowledges: look at what the supervisor has found
PAUSED = -1  # as a checksum that is acknowledged: the replica has heard that it must pause


@dataclass
class Wires:
    """All channels of one rollout.

    Attributes:
        asks: to each replica.
        answers: to each worker.
        free: slots that nobody has.
        finished: slots that are complete, or dropped because their worker ended.
        acks: what a replica says when it holds newer weights, or pauses.
    """

    asks: list[Channel]
    answers: list[Channel]
    free: Channel
    finished: Channel
    acks: Channel

    @classmethod
    def open(cls, context: Any, num_workers: int, num_replicas: int) -> Wires:
        return cls(
            asks=[Channel(context, ASK_RECORD) for _ in range(num_replicas)],
            answers=[Channel(context, ANSWER_RECORD) for _ in range(num_workers)],
            free=Channel(context, SLOT_RECORD),
            finished=Channel(context, SLOT_RECORD),
            acks=Channel(context, ACK_RECORD),
        )

    def close(self) -> None:
        """Close this process's ends of all of them."""
        for channel in [*self.asks, *self.answers, self.free, self.finished, self.acks]:
            channel.close()


@dataclass(frozen=True)
class EnvAddress:
    """Where an env is, and who decides for it.

    Attributes:
        worker: the worker that steps it.
        place: its place within the worker.
        rows: its rows among all rows.
        replica: the replica that answers it.
    """

    worker: int
    place: int
    rows: range
    replica: int
