"""``InferenceReplica``: a copy of the policy on one device, which answers the envs in dynamic batches."""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vla_async import keys
from vla_async.collectors.acting import ActingPolicy
from vla_async.collectors.batcher import DynamicBatcher, Share
from vla_async.collectors.board import SlotState
from vla_async.collectors.complaint import Complaint
from vla_async.collectors.orders import ReplicaOrders, ReplicaSettings
from vla_async.collectors.slab import TRAJ_IDS, Key, Leaf
from vla_async.collectors.slot_writer import numpy_rows
from vla_async.collectors.wires import DECIDE, PAUSED, Ask, EnvAddress, Wires, clock
from vla_async.monitor.timeline_track import Kind
from vla_async.monitor.torch_trace import TorchTrace
from vla_async.shared_memory import numbers
from vla_async.weights.publisher import WeightReceiver


@dataclass(slots=True)
class _Request:
    """A decision for an env, or the end of a slot (``rows`` are then those of the slab that want a value)."""

    generation: int
    sent: float
    first_row: int  # of the env, or the row that wrote to the slot
    address: EnvAddress | None = None
    slot: int = -1
    rows: list[int] = field(default_factory=list)
    answered: int = 0


class InferenceReplica:
    """Answers the requests of its envs in batches.

    Args:
        number: its number among the replicas.
        acting: the policy.
        settings: how it works.
        orders: what it works with.
        wires: the channels.
    """

    def __init__(
        self, number: int, acting: ActingPolicy, settings: ReplicaSettings, orders: ReplicaOrders, wires: Wires
    ) -> None:
        self.number, self.acting, self.settings, self.orders, self.wires = number, acting, settings, orders, wires
        self.slab, self.board = orders.slab, orders.board
        self._complaint = Complaint(orders.slab, orders.board, acting.reads)
        self._envs = {address.rows.start: address for address in orders.envs}
        rows = max(1, sum(len(address.rows) for address in orders.envs))  # one that has no envs is legal
        # when all rows wait, nothing else can come
        most = rows if settings.lockstep else min(settings.max_batch_size, rows)
        self._most = min(settings.max_batch_size, rows)
        self.batcher: DynamicBatcher[_Request] = DynamicBatcher(
            most, float("inf") if settings.lockstep else settings.max_wait_s
        )
        self._generations = dict.fromkeys(self._envs, 0)
        self._absent: set[int] = set()  # envs that have no episode to play
        self._hungry: set[int] = set()  # envs that wait for a slot
        # read and written number by number: on a core that has just slept, an operation on an array costs as much as a
        # hundred numbers, and one on a tensor twice that
        self._slots, self._steps, self._asked = map(numbers, (self.board.slot, self.board.step, self.board.decisions))
        self._request_base = numbers(orders.request_base.numpy())
        self._leaves = {leaf.key: self.slab.rows(leaf.key) for leaf in orders.slab.layout.leaves}
        self._versions = numbers(self._leaves[(keys.POLICY_VERSION,)].numpy()[:, 0])
        self._arrays = {leaf.key: numpy_rows(self._leaves[leaf.key]) for leaf in [*acting.reads, *acting.writes]}
        self._receiver = None
        if orders.weights is not None and isinstance(acting.policy, nn.Module):
            fixed = acting.device.type != "cpu" or settings.compile_policy
            self._receiver = WeightReceiver(acting.policy, orders.weights, copy=fixed)
        # kernels round differently in batches of different sizes, and in lockstep the results must not depend on timing
        self._least = self._most if settings.lockstep else 0
        self._latest, self._began, self._paused = -float("inf"), clock(), False
        self._env_of = {row: address.rows.start for address in orders.envs for row in address.rows}
        self._torch_trace = TorchTrace(orders.torch_trace) if orders.torch_trace else None
        # in lockstep, the ends of slots are answered together too, when every env that has been answered was heard again
        self._ends: list[_Request] = []
        self._unheard: set[int] = set()

    @property
    def version(self) -> int:
        return 0 if self._receiver is None else self._receiver.version

    def run(self) -> None:
        """Serve until told to stop."""
        asks = self.wires.asks[self.number]
        poller = select.poll()
        poller.register(asks, select.POLLIN)
        if self._receiver is not None:
            self.wires.acks.send(self.number, self.version, self._receiver.checksum())
        while True:
            deadline = None if self._paused else self.batcher.next_deadline()
            poller.poll(None if deadline is None or deadline == float("inf") else max(0.0, deadline - clock()) * 1e3)
            if self._torch_trace is not None and self.orders.track is not None:
                self._torch_trace.follow(self.orders.track.is_on)  # before newer weights are acknowledged
            for record in asks.receive():
                if not self._hear(*record):
                    return
            if self._ends and not self._unheard and not self._paused:
                ends, self._ends = self._ends, []
                self._answer_in_order([Share(end, 0, len(end.rows)) for end in ends])
            if self.settings.lockstep:
                self._set_barrier()
            batch = None if self._paused else self.batcher.pop_due(self._now())
            if batch is not None:
                self._answer_all(batch)
            self.orders.tally.at(clock() - self._began)

    def _now(self) -> float:
        self._latest = max(self._latest, clock())
        return self._latest

    def _hear(self, what: int, generation: int, id: int, sent: float) -> bool:
        """Take in a record; False if it says to stop."""
        if what == DECIDE and generation == self._generations[id]:
            if self.settings.lockstep:
                self._set_absent(id, False)
            address = self._envs[id]
            self._put(_Request(generation, sent, id, address), len(address.rows))
        elif what == Ask.HUNGRY and generation == self._generations[id]:
            self._hungry.add(id)
            self._unheard.discard(id)
        elif what == Ask.ABSENT and generation == self._generations[id]:
            self._set_absent(id, True)
        elif what == Ask.FINISH:
            self._finish(id, sent)
        elif what == Ask.FORGET:
            self._forget(id, generation)
        elif what in (Ask.PAUSE, Ask.RESUME):
            self._paused = what == Ask.PAUSE
            if self._paused:
                self.wires.acks.send(self.number, self.version, PAUSED)
        elif what == Ask.WEIGHTS and self._receiver is not None:
            self._swap(self._receiver)
        return what != Ask.STOP

    def _swap(self, receiver: WeightReceiver) -> None:
        """Take over newer weights, and say so."""
        began = clock()
        if receiver.update():
            self.wires.acks.send(self.number, receiver.version, receiver.checksum())
            if self.orders.track is not None:
                self.orders.track.add(Kind.SWAP, began, clock(), receiver.version)

    def _set_absent(self, id: int, absent: bool) -> None:
        """Note that an env was heard, and whether it takes part."""
        self._unheard.discard(id)
        self._hungry.discard(id)
        (self._absent.add if absent else self._absent.discard)(id)

    def _set_barrier(self) -> None:
        """In lockstep, all envs decide together, but those that have nothing to decide on, or no slot and none is free."""
        others = self._absent if bool((self.board.state == SlotState.FREE).any()) else self._absent | self._hungry
        rows = sum(len(env.rows) for start, env in self._envs.items() if start not in others)
        self.batcher.max_batch_size = max(rows, 1)

    def _put(self, request: _Request, rows: int) -> None:
        # what was sent while a batch was computed has waited since then, not since it was heard
        self._latest = max(self._latest, request.sent)
        self.batcher.put(request, self._latest, rows)

    def _finish(self, slot: int, sent: float) -> None:
        row = int(self._leaves[TRAJ_IDS][slot * self.slab.layout.rows_per_slot]) % len(self.board.slot)
        self._unheard.discard(self._env_of[row])
        rows = self.slab.bootstrap_rows(slot) if self.acting.has_value else []
        if not rows:
            self._hand_over(slot)
            return
        self.board.state[slot] = SlotState.CLOSING
        end = _Request(0, sent, row, slot=slot, rows=rows)
        if self.settings.lockstep:
            self._ends.append(end)
        else:
            self._put(end, len(rows))

    def _hand_over(self, slot: int) -> None:
        self.board.state[slot] = SlotState.FINISHED
        self.wires.finished.send(slot)

    def _forget(self, id: int, generation: int) -> None:
        """Give back the slots of an env whose worker has ended; ``generation`` is that of the next one."""
        self._generations[id] = generation
        self._set_absent(id, False)
        rows = self._envs[id].rows
        for row in rows:
            slot = int(self.board.slot[row])
            self.board.slot[row] = -1
            # a worker may have ended when it had told of a finished slot, but still had it; by now that is another row's
            is_lost = slot >= 0 and self.board.owner[slot] == row
            if is_lost and self.board.state[slot] in (SlotState.FREE, SlotState.ACTING):  # else it was finished before
                if not self.slab.layout.spans_episodes:  # the next worker plays all that was admitted but this
                    number = int(self._leaves[TRAJ_IDS][slot * self.slab.layout.rows_per_slot])
                    self.board.episodes[row] = number // len(self.board.slot) + 1
                self.board.state[slot] = SlotState.DROPPED
                self.wires.finished.send(slot)
        self.wires.answers[self._envs[id].worker].send(generation, self._envs[id].place, 0)

    def _answer_all(self, batch: list[Share[_Request]]) -> None:
        """Answer a due batch; in lockstep it holds all envs, and is cut to what the device takes at once."""
        if not self.settings.lockstep:
            self._answer(batch)
            return
        self._unheard = {share.request.first_row for share in batch}
        self._answer_in_order(batch)

    def _answer_in_order(self, batch: list[Share[_Request]]) -> None:
        """Answer by row, so that who asked first makes no difference."""
        batch = sorted(batch, key=lambda share: (share.request.first_row, share.start))
        cutter: DynamicBatcher[Share[_Request]] = DynamicBatcher(self._most, 0.0)
        for share in batch:
            cutter.put(share, 0.0, share.stop - share.start)
        while (part := cutter.pop_due(0.0)) is not None:
            self._answer([Share(s.request.request, s.request.start + s.start, s.request.start + s.stop) for s in part])

    def _answer(self, batch: Sequence[Share[_Request]]) -> None:
        """One forward pass: gather, decide, write, and wake the envs."""
        batch = [share for share in batch if self._is_current(share.request)]
        if not batch:
            return
        began = clock()
        rows, request_keys, decisions = self._rows(batch)
        if len(rows):  # else all of them stand still, in a batch that was cut
            try:
                made = self.acting.decide(self._gather, rows, request_keys, self._least)
            except Exception as error:
                about = self._complaint.about(rows, self.version)
                raise RuntimeError(f"the policy failed on a batch of {len(rows)} rows; {about}") from error
            self._write(made, rows, decisions)
        for share in batch:
            self._tell(share)
        now, waits = clock(), [began - share.request.sent for share in batch]
        self.orders.tally.add(len(rows), waits, now - began, len(self.batcher))
        if self.orders.track is not None:
            self.orders.track.add(Kind.FORWARD, began, now, len(rows), self.version, int(1e6 * max(waits)))

    def _is_current(self, request: _Request) -> bool:
        address = request.address
        return address is None or request.generation == self._generations[address.rows.start]

    def _rows(self, batch: Sequence[Share[_Request]]) -> tuple[NDArray[np.int64], list[int], int]:
        """The rows of the slab that a batch is about, their request keys, and how many of them, the first, are decisions."""
        rows, request_keys, ends = list[int](), list[int](), list[int]()
        R, slots, steps = self.slab.layout.rows_per_slot, self._slots, self._steps
        for request, start, stop in batch:
            if request.address is None:
                ends += request.rows[start:stop]
                continue
            first = request.address.rows.start
            for row in range(first + start, first + stop):
                if (slot := slots[row]) >= 0:  # rows without a slot stand still
                    rows.append(slot * R + steps[row])
                    request_keys.append(self._request_base[row] + self._asked[row] - 1)
        decisions = len(rows)
        return np.array(rows + ends, np.int64), request_keys + [0] * len(ends), decisions

    def _gather(self, leaf: Leaf, rows: NDArray[np.int64], out: Tensor | None) -> Tensor:
        if out is not None:
            return torch.index_select(self._leaves[leaf.key], 0, torch.from_numpy(rows), out=out)
        taken = torch.from_numpy(self._arrays[leaf.key].take(rows, 0))
        return taken if taken.dtype == leaf.dtype else taken.view(leaf.dtype)

    def _write(self, made: dict[Key, Tensor], rows: NDArray[np.int64], decisions: int) -> None:
        """Write what was decided into the rows; of the ends of slots, which come last, the value alone."""
        self._complaint.check_finite(made if decisions else {(keys.VALUE,): made[(keys.VALUE,)]}, rows, self.version)
        where = rows[:decisions]
        if decisions < len(rows):
            self._arrays[(keys.VALUE,)][rows[decisions:]] = numpy_rows(made[(keys.VALUE,)])[decisions:]
        if not decisions:
            return
        for leaf in self.acting.writes:
            self._arrays[leaf.key][where + 1 if leaf.carried else where] = numpy_rows(made[leaf.key])[:decisions]
        version = self.version
        for row in where.tolist():
            self._versions[row] = version

    def _tell(self, share: Share[_Request]) -> None:
        """Wake the env, or hand the slot over, that a share belongs to."""
        request, count = share.request, share.stop - share.start
        if request.address is not None:
            self.wires.answers[request.address.worker].send(request.generation, request.address.place, count)
            return
        request.answered += count
        if request.answered == len(request.rows):
            self._hand_over(request.slot)
