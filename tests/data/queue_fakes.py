"""A queue without processes: the test plays the workers and the replica."""

from __future__ import annotations

import multiprocessing as mp

import torch

from vla_async.collectors.acting import VERSION_LEAF
from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.row_env import TASK
from vla_async.collectors.slab import UNANSWERED, Leaf, Slab, SlabLayout, write_text
from vla_async.collectors.wires import SLOT_RECORD
from vla_async.data.queue import TrajectoryQueue
from vla_async.data.selection import Selection
from vla_async.shared_memory import Channel

T = 2


class Rig:
    """A queue whose workers are played by the test."""

    def __init__(self, num_slots: int, num_rows: int = 1) -> None:
        done = [Leaf((name,), (1,), torch.bool, "outcome") for name in ("done", "terminated", "truncated")]
        task = Leaf(TASK, (4,), torch.uint8, "decision", is_text=True)
        self.slab = Slab(SlabLayout((VERSION_LEAF, task, *done), num_slots, T, spans_episodes=False))
        self.board = Board(num_rows, num_slots, 1)
        context = mp.get_context("spawn")
        self.finished, self.free = Channel(context, SLOT_RECORD), Channel(context, SLOT_RECORD)
        self.error: Exception | None = None
        self.queue = TrajectoryQueue(self.slab, self.board, self.finished, self.free, self.check)
        self.queue.open()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def begin(self, version: int = UNANSWERED, task: str = "") -> int:
        [(slot,)] = self.free.receive(1)
        self.board.state[slot] = SlotState.ACTING
        self.slab.rows(VERSION_LEAF.key)[slot * (T + 1)] = version
        write_text(task, self.slab.rows(TASK)[slot * (T + 1)])
        return int(slot)

    def finish(self, slot: int, state: SlotState = SlotState.FINISHED) -> None:
        self.board.state[slot] = state
        self.finished.send(slot)

    def would_hand_out(
        self, count: int, version: int, eta: int, earlier: int = 0, later: int = 0, selection: Selection = "oldest"
    ) -> bool:
        len(self.queue)  # takes in what has been finished
        return bool(self.queue._choose(count, version, eta, earlier, later, selection))

    def close(self) -> None:
        self.finished.close()
        self.free.close()

    def free_slots(self) -> list[int]:
        slots = [slot for (slot,) in self.free.receive()]
        for slot in slots:
            self.free.send(slot)
        return slots
