"""The process of an env shard: ``EnvWorker`` steps its envs, each as soon as its decision is there."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torchrl.envs import EnvBase

from vla_async import keys
from vla_async.collectors.groups import Grouping
from vla_async.collectors.orders import EnvsReady, WorkerOrders
from vla_async.collectors.row_env import EnvBaseRows, FactoryRows, RowEnv
from vla_async.collectors.single_row import SingleRow, SingleRowWriter
from vla_async.collectors.slot_writer import SlotWriter
from vla_async.collectors.wires import ADMITTED, DECIDE, STOPPED, Ask, Wires, clock
from vla_async.collectors.worker import Reporting, leave_signals_to_parent
from vla_async.envs.base import EnvFactory
from vla_async.monitor.timeline_track import Kind, Track
from vla_async.shared_memory import numbers


@dataclass(frozen=True)
class EnvSource:
    """How to build one env of a shard: env ``index`` of a factory, or whatever a callable returns.

    Attributes:
        make: builds it.
        index: which one.
        grouping: of the rows of a factory; None where slots hold fragments.
    """

    make: EnvFactory | Callable[[], EnvBase]
    index: int = 0
    grouping: Grouping | None = None

    def build(self, text_bytes: int) -> RowEnv:
        if isinstance(self.make, EnvFactory):
            env = self.make.make(self.index)
            rows = SingleRow if SingleRow.suits(env) else FactoryRows
            return rows(env, text_bytes, self.grouping)
        return EnvBaseRows(self.make, text_bytes)


class EnvWorker:
    """Steps the envs of a shard, each as soon as its decision is there.

    Args:
        number: its number among the workers.
        envs: its envs, built.
        orders: what to do with them.
        wires: the channels.
    """

    def __init__(self, number: int, envs: Sequence[RowEnv], orders: WorkerOrders, wires: Wires) -> None:
        self.number, self.orders, self.wires, self.board = number, orders, wires, orders.board
        self.writers = [self._writer(env, address.rows) for env, address in zip(envs, orders.envs, strict=True)]
        self._answered = [0] * len(self.writers)
        self._addresses = [(wires.asks[address.replica], address.rows.start) for address in orders.envs]
        board = orders.board  # as memory: a number costs a tenth of what an array of one costs
        self._busy_since, self._busy, self._env_steps = map(numbers, (board.busy_since, board.busy, board.env_steps))
        self._hungry: list[int] = []  # the envs with a row that has no slot, in the order in which they came to it
        self._absent: set[int] = set()  # those of them whose replica knows that they have nothing to decide on
        self._known_hungry: set[int] = set()  # those of them whose replica knows that they wait for a slot

    def _writer(self, env: RowEnv, rows: range) -> SlotWriter:
        if isinstance(env, SingleRow) and self.orders.slab.rows(keys.CHUNK).dtype != torch.bfloat16:  # unknown to NumPy
            return SingleRowWriter(env, self.orders.slab, self.board, rows)
        return SlotWriter(env, self.orders.slab, self.board, rows)

    def run(self) -> None:
        """Serve until told to stop."""
        poller = select.poll()
        answers, free = self.wires.answers[self.number], self.wires.free
        poller.register(answers, select.POLLIN)
        if self.orders.generation == 0:
            for place in range(len(self.writers)):
                self._begin(place)
        while True:
            self._feed()
            before = clock()
            wants = any(self.writers[place].wanted for place in self._hungry)
            if wants:
                poller.register(free, select.POLLIN)
            poller.poll()
            if wants:
                poller.unregister(free)
            if self._hungry:
                now = clock()
                self.board.waiting[self.number] += now - before
                if self.orders.track is not None:
                    self.orders.track.add(Kind.NO_SLOT, before, now, len(self._hungry))
            for generation, place, rows in answers.receive():
                if generation == STOPPED:
                    return
                if generation == ADMITTED:
                    continue  # the board says whom
                if generation == self.orders.generation:  # else it answers the worker that was here before
                    self._take(place, rows) if rows else self._begin(place)

    def _begin(self, place: int) -> None:
        """Start an env: at once, or in place of an ended worker's when the replica has given back what that one had."""
        started, writer = self._enter(), self.writers[place]
        writer.start(self.orders.seed)
        now = self._leave(started)
        if self.orders.track is not None:
            self.orders.track.add(Kind.RESET, started, now, writer.rows.start, len(writer.rows))
        self._hungry.append(place)

    def _take(self, place: int, rows: int) -> None:
        self._answered[place] += rows
        writer = self.writers[place]
        if self._answered[place] < len(writer.rows):
            return
        self._answered[place] = 0
        started = self._enter()
        complete = writer.act()
        now = self._leave(started)
        self._env_steps[self.number] += writer.env_steps
        if self.orders.track is not None:
            self._record(self.orders.track, writer, started, now, complete)
        if complete:
            # in this order: if this worker dies in between, the replica knows of the slots and will not give them back
            self._ask(place, Ask.FINISH, *map(writer.slot_of, complete))
            for row in complete:
                writer.leave(row)
        if writer.lacking:
            self._hungry.append(place)
        else:
            self._decide(place)

    def _feed(self) -> None:
        """Take free slots for the envs that need some, first come first served."""
        for place in [*self._hungry]:
            writer = self.writers[place]
            if wanted := writer.wanted:
                self.board.claiming[self.number] = 1  # whoever finds this worker dead must look what it had taken
                slots = [slot for (slot,) in self.wires.free.receive(wanted)]
                if slots:
                    writer.give(slots)
                self.board.claiming[self.number] = 0
            if writer.ready:
                self._hungry.remove(place)
                self._decide(place)
            elif writer.wanted:
                self._tell_hungry()
                return  # those behind have come later
            elif place not in self._absent:
                self._absent.add(place)
                self._ask(place, Ask.ABSENT, self.orders.envs[place].rows.start)

    def _tell_hungry(self) -> None:
        """In lockstep, a replica must not wait for an env that waits for what only the others can bring about."""
        if self.orders.lockstep:
            for place in {*self._hungry} - self._known_hungry:
                self._ask(place, Ask.HUNGRY, self.orders.envs[place].rows.start)
            self._known_hungry.update(self._hungry)

    def _decide(self, place: int) -> None:
        self._absent.discard(place)
        self._known_hungry.discard(place)
        self.writers[place].ask()
        self._ask(place, DECIDE, self._addresses[place][1])

    def _ask(self, place: int, what: int, *ids: int) -> None:
        # at once, or the replica would answer the first alone
        self._addresses[place][0].send_all([(what, self.orders.generation, id, clock()) for id in ids])

    def _enter(self) -> float:
        self._busy_since[self.number] = now = clock()
        return now

    def _leave(self, started: float) -> float:
        self._busy_since[self.number] = 0.0
        now = clock()
        self._busy[self.number] += now - started
        return now

    @staticmethod
    def _record(track: Track, writer: SlotWriter, started: float, ended: float, complete: list[int]) -> None:
        """Record a decision that was executed, and what it ended; before anybody hears of it."""
        first, count = writer.rows.start, len(writer.rows)
        track.add(Kind.ENV_STEPS, started, ended, first, count, writer.env_steps)
        if writer.reset_at is not None:
            track.add(Kind.RESET, *writer.reset_at, first, count)
            writer.reset_at = None
        for row in complete:
            track.add(Kind.FINISHED, started, ended, writer.slot_of(row))


def yield_to_replicas() -> None:
    """Ask the scheduler not to interrupt others when this process wakes up.

    A replica wakes many workers one after the other. On few cores each of them would push it aside, and with it all envs
    that still wait for its next batch. The share of the CPU stays the same.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_env_worker(link: Connection, number: int, sources: bytes, text_bytes: int, wires: Wires) -> None:
    """Body of the process: build the envs, say what they are like, then serve until told to stop.

    Args:
        link: to the supervisor; carries :class:`EnvsReady`, then :class:`WorkerOrders` back, and the end of it all.
        number: the worker's number.
        sources: its :class:`EnvSource` objects, pickled (by cloudpickle, for they may hold lambdas).
        text_bytes: longest text of an observation.
        wires: the channels.
    """
    leave_signals_to_parent()
    yield_to_replicas()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    envs: list[RowEnv] = []
    try:
        with Reporting(link):
            parts: list[EnvSource] = pickle.loads(sources)
            for part in parts:
                envs.append(part.build(text_bytes))
                if envs[-1].leaves != envs[0].leaves:
                    raise ValueError(f"env {len(envs) - 1} of this worker gives {envs[-1].leaves}, env 0 {envs[0].leaves}")
            link.send(EnvsReady([env.num_rows for env in envs], envs[0].leaves, envs[0].action_specs, envs[0].env_spec))
        orders = link.recv()
        with Reporting(link), torch.no_grad():
            EnvWorker(number, envs, orders, wires).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody is left to tell
    finally:
        for env in envs:
            env.close()
