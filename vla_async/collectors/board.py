"""``Board``: the numbers by which the processes of a rollout know of each other. Each has one writer at a time."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_async.shared_memory import Field, SharedBlock

NO_LIMIT = 2**62  # of the episodes that a row may begin


class SlotState(IntEnum):
    """Who has a slot."""

    FREE = 0  # nobody
    ACTING = 1  # an env worker
    CLOSING = 2  # a replica, which values its end
    FINISHED = 3  # the queue, complete
    DROPPED = 4  # the queue, to be given back: its worker has ended
    HELD = 5  # the consumer
    WITHHELD = 6  # the queue, out of circulation


class Board:
    """Shared arrays. Sent to another process, it is the same memory there.

    Attributes:
        slot: int64 ``[N]``, the slot that a row writes to; -1 while it waits for one. By the worker.
        step: int64 ``[N]``, the row's next decision within its slot. By the worker.
        decisions: int64 ``[N]``, decisions that the row has asked for so far. By the worker.
        episodes: int64 ``[N]``, episodes that the row has started so far; where a slot holds one episode, those that it has
            begun in a slot. By the worker, and by the replica while the worker is being replaced.
        admitted: int64 ``[N]``, episodes that the row may begin in all; more than there can be, unless a slot holds one
            episode. By the consumer.
        state: int8 ``[S]``, a :class:`SlotState`. By whoever has the slot.
        owner: int64 ``[S]``, the row that a slot was taken for; -1 once it is free again. By whoever has the slot.
        cut: bool ``[S]``, close the slot after the decision that is being made. By the consumer.
        busy_since: float64 ``[W]``, when a worker went into its env (monotonic seconds); 0 while it is out of it.
        claiming: int8 ``[W]``, 1 while a worker takes slots. By the worker.
        env_steps: int64 ``[W]``, env steps that a worker has executed. By the worker.
        busy: float64 ``[W]``, seconds that a worker has spent in its env and in writing. By the worker.
        waiting: float64 ``[W]``, seconds that a worker has waited for free slots. By the worker.
        version: int64 ``[1]``, the newest published policy_version. By the publisher.

    Args:
        num_rows: N, env rows of all workers.
        num_slots: S.
        num_workers: W.
    """

    def __init__(self, num_rows: int, num_slots: int, num_workers: int) -> None:
        per_row = dict.fromkeys(("slot", "step", "decisions", "episodes", "admitted"), Field((num_rows,), torch.int64))
        per_slot = {"state": Field((num_slots,), torch.int8), "owner": Field((num_slots,), torch.int64)}
        per_slot["cut"] = Field((num_slots,), torch.bool)
        times = dict.fromkeys(("busy_since", "busy", "waiting"), Field((num_workers,), torch.float64))
        counts = {"claiming": Field((num_workers,), torch.int8), "env_steps": Field((num_workers,), torch.int64)}
        single = {"version": Field((1,), torch.int64)}
        self._attach(SharedBlock(per_row | per_slot | times | counts | single))
        self.slot[:] = self.owner[:] = -1
        self.admitted[:] = NO_LIMIT

    def _attach(self, block: SharedBlock) -> None:
        self._block = block
        self.slot: NDArray[Any]
        self.step: NDArray[Any]
        self.decisions: NDArray[Any]
        self.episodes: NDArray[Any]
        self.admitted: NDArray[Any]
        self.state: NDArray[Any]
        self.owner: NDArray[Any]
        self.cut: NDArray[Any]
        self.busy_since: NDArray[Any]
        self.claiming: NDArray[Any]
        self.env_steps: NDArray[Any]
        self.busy: NDArray[Any]
        self.waiting: NDArray[Any]
        self.version: NDArray[Any]
        for name, tensor in block.tensors.items():
            setattr(self, name, tensor.numpy())

    def slots_in(self, state: SlotState) -> int:
        """How many slots are in a state now."""
        return int((self.state == state).sum())

    def busy_s(self, now: float) -> NDArray[Any]:
        """float64 ``[W]``, :attr:`busy` with what each worker is doing now (monotonic seconds), which may take long."""
        busy = self.busy.copy()  # read first: what ends in between is missed now rather than counted twice
        since = self.busy_since.copy()
        total: NDArray[Any] = busy + np.where(since > 0.0, now - since, 0.0)
        return total

    def __getstate__(self) -> SharedBlock:
        return self._block

    def __setstate__(self, state: SharedBlock) -> None:
        self._attach(state)
