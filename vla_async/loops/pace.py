"""``Pace``: how an update goes, told at its end and while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vla_async.collectors.fleet import Fleet
from vla_async.collectors.fleet_meter import FleetMeter
from vla_async.monitor import metric_table as names


class Pace:
    """How long an update takes, how much of that the trainer waits, and what the fleet does meanwhile.

    It measures from when it is made. Any thread may ask.

    Args:
        fleet: serves.

    Attributes:
        meter: of the fleet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.meter = FleetMeter(fleet)
        self._began, self._waited = time.perf_counter(), 0.0
        self._waits_since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block, the trainer has nothing to train on."""
        self._waits_since = started = time.perf_counter()
        yield
        self._waits_since, self._waited = None, self._waited + time.perf_counter() - started

    @property
    def took(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    def metrics(self, took: float) -> dict[str, float]:
        """What to log of an update that took so many seconds."""
        return {**self._times(took), **self.meter.metrics(took)}

    def live(self) -> dict[str, float]:
        """Of the metrics, those that cost next to nothing, so far."""
        took = self.took
        return {**self._times(took), **self.meter.live(took)}

    def _times(self, took: float) -> dict[str, float]:
        since = self._waits_since
        waited = self._waited + (0.0 if since is None else time.perf_counter() - since)
        return {names.UPDATE_S: took, names.WAIT_S: waited, names.TRAINER_IDLE: min(1.0, waited / took)}
