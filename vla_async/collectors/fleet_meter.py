"""``FleetMeter``: what the processes of a fleet do in an update."""

from __future__ import annotations

import os

import numpy as np

from vla_async.collectors.board import SlotState
from vla_async.collectors.fleet import Fleet
from vla_async.collectors.tally import Totals
from vla_async.collectors.wires import clock
from vla_async.monitor import metric_table as names
from vla_async.monitor.metrics import mean
from vla_async.monitor.process_memory import MIB, own_mib


class FleetMeter:
    """Measures from when it is made.

    Args:
        fleet: serves.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._occupied = fleet, list[float]()
        self._busy, self._waiting, self._totals = self._now()
        self._env_steps = int(fleet.board.env_steps.sum())

    def _now(self) -> tuple[float, float, Totals]:
        """Seconds that all workers have been busy, and without a slot; and what the replicas have counted."""
        board = self._fleet.board
        return float(board.busy_s(clock()).sum()), float(board.waiting.sum()), Totals.of(self._fleet.tallies)

    def look(self) -> None:
        """Note how many of the slots are occupied."""
        self._occupied.append(self._slots()[1])

    def _slots(self) -> tuple[int, float]:
        """How many slots are in circulation, and the share of them that is not free."""
        states = np.bincount(self._fleet.board.state, minlength=len(SlotState)).tolist()
        circulating = sum(states) - states[SlotState.WITHHELD]
        return circulating, 1.0 - states[SlotState.FREE] / circulating

    def live(self, took: float) -> dict[str, float]:
        """Of the metrics, those that cost next to nothing, so far; slots as they are now. Any thread may ask."""
        busy, waiting, totals = self._now()
        env_steps = int(self._fleet.board.env_steps.sum()) - self._env_steps
        return {
            **self._shares(took, busy - self._busy, waiting - self._waiting, totals - self._totals),
            names.OCCUPIED: self._slots()[1],
            names.ENV_STEPS_PER_S: env_steps / took,  # executed: what will have been taken is not known yet
        }

    def _shares(self, took: float, busy: float, waiting: float, counted: Totals) -> dict[str, float]:
        fleet = self._fleet
        workers, replicas = took * len(fleet.board.busy), took * len(fleet.tallies)
        return {
            names.WORKER_IDLE: max(0.0, 1.0 - busy / workers),
            names.WORKER_NO_SLOT: min(1.0, waiting / workers),  # a wait counts when it is over
            names.WORKER_RESTARTS: float(fleet.restarts),
            names.REPLICA_IDLE: max(0.0, 1.0 - float(counted.seconds[0]) / replicas),  # a batch counts when it is over
            names.WAITING: float(fleet.board.slots_in(SlotState.FINISHED)),
            names.SLOTS: float(self._slots()[0]),
        }

    def metrics(self, took: float) -> dict[str, float]:
        """What to log.

        Args:
            took: seconds since this was made.
        """
        busy, waiting, totals = self._now()
        counted = totals - self._totals
        return {
            **self._shares(took, busy - self._busy, waiting - self._waiting, counted),
            **counted.metrics(),
            **counted.shares(),
            **{name: float(number) for name, number in self._fleet.queue.metrics().items()},
            names.OCCUPIED: mean(self._occupied),
            **self._memory(),
        }

    def _memory(self) -> dict[str, float]:
        workers, replicas = self._fleet.pids
        return {
            names.TRAINER_MIB: own_mib([os.getpid()]),
            names.WORKERS_MIB: own_mib(workers),
            names.REPLICAS_MIB: own_mib(replicas),
            names.SLAB_MIB: self._fleet.slab.layout.nbytes / MIB,
        }
