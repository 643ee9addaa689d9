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

from vla_async.collectors.orders import EnvsReady, WorkerOrders
from vla_async.collectors.row_env import EnvBaseRows, FactoryRows, RowEnv
from vla_async.collectors.slot_writer import SlotWriter
from vla_async.collectors.wires import STOPPED, Ask, Wires, clock
from vla_async.collectors.worker import Reporting, leave_signals_to_parent
from vla_async.envs.base import EnvFactory


@dataclass(frozen=True)
class EnvSource:
    """How to build one env of a shard: env ``index`` of a factory, or whatever a callable returns."""

    make: EnvFactory | Callable[[], EnvBase]
    index: int = 0

    def build(self, text_bytes: int) -> RowEnv:
        if isinstance(self.make, EnvFactory):
            return FactoryRows(self.make.make(self.index), text_bytes)
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
        self.writers = [
            SlotWriter(env, orders.slab, orders.board, address.rows) for env, address in zip(envs, orders.envs, strict=True)
        ]
        self._answered = [0] * len(self.writers)
        self._hungry: list[int] = []  # the envs with a row that has no slot, in the order in which they came to it

    def run(self) -> None:
        """Serve until told to stop."""
        poller = select.poll()
        answers, free = self.wires.answers[self.number], self.wires.free
        poller.register(answers, select.POLLIN)
        if self.orders.generation == 0:
            for place in range(len(self.writers)):
                self._begin(place)
        while True:
            if self._hungry:
                self._feed()
            if self._hungry:
                poller.register(free, select.POLLIN)
                before = clock()
                poller.poll()
                self.board.waiting[self.number] += clock() - before
                poller.unregister(free)
            else:
                poller.poll()
            for generation, place, rows in answers.receive():
                if generation == STOPPED:
                    return
                if generation == self.orders.generation:  # else it answers the worker that was here before
                    self._take(place, rows) if rows else self._begin(place)

    def _begin(self, place: int) -> None:
        """Start an env: at once, or in place of an ended worker's when the replica has given back what that one had."""
        started = self._enter()
        self.writers[place].start(self.orders.seed)
        self._leave(started)
        self._hungry.append(place)

    def _take(self, place: int, rows: int) -> None:
        self._answered[place] += rows
        writer = self.writers[place]
        if self._answered[place] < len(writer.rows):
            return
        self._answered[place] = 0
        started = self._enter()
        complete = writer.act()
        self._leave(started)
        self.board.env_steps[self.number] += writer.env_steps
        for row in complete:
            # in this order: if this worker dies in between, the replica knows of the slot and will not give it back
            self._ask(place, Ask.FINISH, writer.slot_of(row))
            writer.leave(row)
        if complete:
            self._hungry.append(place)
        else:
            self._decide(place)

    def _feed(self) -> None:
        """Take free slots for the envs that need some, first come first served."""
        while self._hungry:
            writer = self.writers[self._hungry[0]]
            self.board.claiming[self.number] = 1  # whoever finds this worker dead must look what it had taken
            slots = [slot for (slot,) in self.wires.free.receive(writer.lacking)]
            if slots:
                writer.give(slots)
            self.board.claiming[self.number] = 0
            if writer.lacking:
                return
            self._decide(self._hungry.pop(0))

    def _decide(self, place: int) -> None:
        self.writers[place].ask()
        self._ask(place, Ask.DECIDE, self.orders.envs[place].rows.start)

    def _ask(self, place: int, what: Ask, id: int) -> None:
        replica = self.orders.envs[place].replica
        self.wires.asks[replica].send(what, self.orders.generation, id, clock())

    def _enter(self) -> float:
        now = clock()
        self.board.busy_since[self.number] = now
        return now

    def _leave(self, started: float) -> None:
        self.board.busy_since[self.number] = 0.0
        self.board.busy[self.number] += clock() - started


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
