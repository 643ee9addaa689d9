"""A rollout in a process of its own, for tests that end that process from outside."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes import ClockEnvs, KnownPolicy
from vla_async.collectors import StreamingCollector


def hold_a_rollout(root: Path, lets_go: bool) -> None:
    """Collect, with one env that hangs, and say which processes there are; then wait to be killed, or end without a word."""
    envs = ClockEnvs(num_envs=3, fault="hang-in-step", fault_env=1, fault_step=9, flag=str(root / "hangs"))
    collector = StreamingCollector(envs, KnownPolicy(), frames_per_batch=6, fragment_length=1)
    for _ in collector:
        if (root / "hangs").exists():
            break
    fleet = collector.fleet
    pids = [member.process.pid for member in [*fleet._workers, *fleet._replicas]]
    (root / "pids.part").write_text(" ".join(map(str, [os.getpid(), *pids])))
    (root / "pids.part").rename(root / "pids")
    if not lets_go:
        for _ in collector:
            pass
