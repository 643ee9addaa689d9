"""Lockstep when its envs are out of phase."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, take


def test_a_worker_that_dies_in_mid_fragment_does_not_stop_lockstep() -> None:
    """The others are through before its successor, and lack the slots that only a full batch gives back."""
    envs = [partial(CounterEnv, number, delay_s=0.02) for number in range(3)]
    with collecting(envs, Pusher(), frames_per_batch=60, max_in_flight=1, async_interaction=False) as collector:
        take(collector, 1)
        victim = collector.fleet._workers[1].process.pid
        assert victim is not None
        killer = threading.Timer(0.2, os.kill, [victim, signal.SIGKILL])
        killer.start()
        assert len(take(collector, 3)) == 3
        killer.join()
        assert collector.stats()["restarts"] == 1
