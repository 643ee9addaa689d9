"""``Track``: what one process has done, in shared memory, until the trainer writes it into the timeline."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vla_async.shared_memory import Field, SharedBlock, numbers

CAPACITY = 8192  # records, 400 kB: more than anybody makes in an update of a few thousand decisions
ARGS = 3
clock = time.monotonic  # as in vla_async.collectors.wires, which builds on this module
_HEAD, _LOST = 0, 1  # of what the writer counts
_TAIL, _ON = 0, 1  # of what the reader says


class Kind(IntEnum):
    """What a record is about; ``LOOKS`` says how it is shown."""

    ENV_STEPS = 0
    RESET = 1
    NO_SLOT = 2
    FINISHED = 3
    FORWARD = 4
    SWAP = 5
    STEP = 6
    WAIT = 7
    READ = 8
    PREPARE = 9
    MICRO_BATCH = 10
    OPTIMIZER = 11
    MEET = 12
    PUBLISH = 13
    CONFIRM = 14
    VALIDATE = 15
    END_OF_STEP = 16
    ROLLOUT = 17
    DECIDE = 18
    ENVS = 19
    TAKEN = 20


class Look(NamedTuple):
    """How a kind of record is shown: the name of its slice, and those of its arguments."""

    name: str
    args: tuple[str, ...] = ()


LOOKS = {
    Kind.ENV_STEPS: Look("env steps", ("first_row", "rows", "env_steps")),
    Kind.RESET: Look("reset", ("first_row", "rows")),
    Kind.NO_SLOT: Look("wait for a slot", ("envs",)),
    Kind.FORWARD: Look("forward", ("rows", "version", "oldest_wait_us")),
    Kind.SWAP: Look("swap weights", ("version",)),
    Kind.STEP: Look("step", ("step",)),
    Kind.WAIT: Look("wait for trajectories"),
    Kind.READ: Look("read", ("trajectories",)),
    Kind.PREPARE: Look("prepare", ("trajectories",)),
    Kind.MICRO_BATCH: Look("forward and backward", ("decisions",)),
    Kind.OPTIMIZER: Look("optimizer step"),
    Kind.MEET: Look("wait for other ranks"),
    Kind.PUBLISH: Look("publish", ("version",)),
    Kind.CONFIRM: Look("wait for replicas", ("version",)),
    Kind.VALIDATE: Look("validate", ("version",)),
    Kind.END_OF_STEP: Look("log and callbacks"),
    Kind.ROLLOUT: Look("roll out", ("version",)),
    Kind.DECIDE: Look("decide", ("rows",)),
    Kind.ENVS: Look("wait for envs", ("rows",)),
}
"""All kinds but the two that are no slices: a trajectory is ``FINISHED`` in a slot, or ``TAKEN`` from it."""


class Record(NamedTuple):
    """One thing that was done.

    Attributes:
        start: when it began, in nanoseconds since some moment that the reader has chosen; 0 if it began before.
        end: when it was over.
        kind: what it was.
        args: what else is known of it; how many count, the kind knows.
    """

    start: int
    end: int
    kind: Kind
    args: tuple[int, ...]


class Track:
    """A ring of records with one writer and one reader. Sent to another process, it is the same memory there.

    A record that finds no room is lost, and counted.

    Args:
        block: of another track, which this one then is as well; by default a new one.
        capacity: most records that wait to be read.
    """

    def __init__(self, block: SharedBlock | None = None, capacity: int = CAPACITY) -> None:
        if block is None:
            fields = {"times": Field((2 * capacity,), torch.float64), "values": Field(((1 + ARGS) * capacity,), torch.int64)}
            block = SharedBlock(fields | dict.fromkeys(("written", "read"), Field((2,), torch.int64)))
        self._attach(block)

    def _attach(self, block: SharedBlock) -> None:
        self.block = block
        arrays: list[NDArray[Any]] = [block[name].numpy() for name in ("times", "values", "written", "read")]
        self._arrays = arrays[0].reshape(-1, 2), arrays[1].reshape(-1, 1 + ARGS)
        self._times, self._values, self._written, self._read = map(numbers, arrays)
        self._capacity, self._known_lost = len(arrays[0]) // 2, 0

    def __getstate__(self) -> SharedBlock:
        return self.block

    def __setstate__(self, block: SharedBlock) -> None:
        self._attach(block)

    @property
    def is_on(self) -> bool:
        """Whether something is recorded; set by the reader."""
        return bool(self._read[_ON])

    @is_on.setter
    def is_on(self, on: bool) -> None:
        self._read[_ON] = on

    def add(self, kind: Kind, start: float, end: float, *args: int) -> None:
        """Record something, if that is wanted now: what it was, from when to when, and up to three numbers."""
        read, written = self._read, self._written
        if not read[_ON]:
            return
        head = written[_HEAD]
        if head - read[_TAIL] >= self._capacity:
            written[_LOST] += 1
            return
        place = head % self._capacity
        times, values, at = self._times, self._values, place * (1 + ARGS)
        times[2 * place], times[2 * place + 1], values[at] = start, end, kind
        for arg in args:
            at += 1
            values[at] = arg
        written[_HEAD] = head + 1  # last, for from here on it may be read

    def drain(self, since: float) -> list[Record]:
        """What was recorded since the last call, with times counted from ``since``; the writer has the room again."""
        head, tail = self._written[_HEAD], self._read[_TAIL]
        places = [number % self._capacity for number in range(tail, head)]
        times = np.rint((self._arrays[0][places] - since) * 1e9).astype(np.int64).clip(0).tolist()
        values = self._arrays[1][places].tolist()
        self._read[_TAIL] = head
        return [
            Record(start, end, _KINDS[kind], tuple(args)) for (start, end), (kind, *args) in zip(times, values, strict=True)
        ]

    def newly_lost(self) -> int:
        """How many records were lost since the last call."""
        before, self._known_lost = self._known_lost, self._written[_LOST]
        return self._known_lost - before


_KINDS = list(Kind)
