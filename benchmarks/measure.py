"""One measurement of one engine, in a process of its own: ``python -m benchmarks.measure JOB`` prints a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import processes
from benchmarks.cases import CASES
from benchmarks.collectors import Engine, build, make_policy
from benchmarks.counting import CountedEnvs, open_counts

_MEMORY_EVERY_S = 10.0
MARK = "MEASURED "


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        case: its name.
        collector: its name.
        seconds: length of the window in which is counted.
        settle_s: time from the moment when every env has stepped to the start of the window.
        max_wait_s: Tmax of our own collector, instead of the case's.
        start_timeout_s: how long the first steps may take.
    """

    case: str
    collector: str
    seconds: float = 8.0
    settle_s: float = 1.0
    max_wait_s: float | None = None
    start_timeout_s: float = 120.0


@dataclass
class Measurement:
    """What was found. Rates are of the window, memory is at its end.

    Attributes:
        rate: env steps/s that the envs made.
        delivered: env steps/s that came out in batches; in whole batches, so it is coarse.
        cores: CPU seconds of all processes per second.
        pss_mb: memory of all processes, shared pages counted once.
        rss_mb: the same with shared pages counted by each.
        start_s: from the start of construction until every env has stepped.
        stop_s: duration of ``shutdown``.
        wait_p50_ms: how long requests waited for their forward, where known.
        wait_p95_ms: the same.
        publishes: number of times that weights were published.
        publish_ms: median time that the publisher was kept.
        memory: (seconds, PSS in MB) through the window, if it is long.
    """

    rate: float = 0.0
    delivered: float = 0.0
    cores: float = 0.0
    pss_mb: float = 0.0
    rss_mb: float = 0.0
    start_s: float = 0.0
    stop_s: float = 0.0
    wait_p50_ms: float | None = None
    wait_p95_ms: float | None = None
    publishes: int = 0
    publish_ms: float | None = None
    memory: list[tuple[float, float]] = field(default_factory=list)


class Watch(threading.Thread):
    """Reads the counters from beside, while the main thread takes batches."""

    def __init__(self, job: Job, counts: NDArray[np.int64], steps_per_frame: int, begin: float) -> None:
        super().__init__(daemon=True)
        self.job, self.counts, self.steps_per_frame, self.begin = job, counts, steps_per_frame, begin
        self.frames, self.measurement = 0, Measurement()
        self.is_over, self.problem = threading.Event(), ""

    def run(self) -> None:
        """Wait for all envs, then measure one window."""
        deadline = self.begin + self.job.start_timeout_s
        while self.counts.min() == 0:
            if time.perf_counter() > deadline:
                self.problem = f"{int((self.counts == 0).sum())} envs made no step in {self.job.start_timeout_s:g} s"
                self.is_over.set()
                return
            time.sleep(0.01)
        found = self.measurement
        found.start_s = time.perf_counter() - self.begin
        time.sleep(self.job.settle_s)
        me = os.getpid()
        cpu, now, steps, frames = processes.cpu_s(me), time.perf_counter(), int(self.counts.sum()), self.frames
        while (left := now + self.job.seconds - time.perf_counter()) > 0.0:
            if self.job.seconds > 6 * _MEMORY_EVERY_S:
                found.memory.append((time.perf_counter() - now, processes.memory(me).pss))
            time.sleep(min(left, _MEMORY_EVERY_S))
        elapsed = time.perf_counter() - now
        found.rate = (int(self.counts.sum()) - steps) / elapsed
        found.delivered = (self.frames - frames) * self.steps_per_frame / elapsed
        found.cores = (processes.cpu_s(me) - cpu) / elapsed
        memory = processes.memory(me)
        found.pss_mb, found.rss_mb = memory.pss, memory.rss
        self.is_over.set()


def measure(job: Job) -> Measurement:
    """Run one engine on one case.

    Raises:
        RuntimeError: if an env never steps.
    """
    torch.set_num_threads(1)
    case = CASES[job.case]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "counts")
        counts = open_counts(path, case.envs.num_envs)
        envs = CountedEnvs(inner=case.envs, path=path)
        policy = make_policy(job.collector, case)
        watch = Watch(job, counts, case.envs.chunk_size, begin=time.perf_counter())
        watch.start()
        max_wait_s = case.max_wait_s if job.max_wait_s is None else job.max_wait_s
        engine = build(job.collector, case, envs, policy, max_wait_s)
        found = watch.measurement
        times = _consume(engine, watch, case.publish_every_s)
        if wait := engine.wait_s():
            found.wait_p50_ms, found.wait_p95_ms = 1e3 * wait[0], 1e3 * wait[1]
        found.publishes, found.publish_ms = len(times), 1e3 * statistics.median(times) if times else None
        begin = time.perf_counter()
        engine.collector.shutdown()
        found.stop_s = time.perf_counter() - begin
    if watch.problem:
        raise RuntimeError(watch.problem)
    return found


def _consume(engine: Engine, watch: Watch, publish_every_s: float | None) -> list[float]:
    """Take batches until the watch is done; returns how long each publication of weights took."""
    times: list[float] = []
    due = time.perf_counter()
    for batch in engine:
        watch.frames += frames_of(batch)
        now = time.perf_counter()
        if publish_every_s is not None and now >= due:
            for parameter in engine.policy.parameters():
                parameter.data.mul_(1.0)
            engine.publish()
            times.append(time.perf_counter() - now)
            due = max(due + publish_every_s, now)
        if watch.is_over.is_set():
            break
    return times


def frames_of(batch: Any) -> int:
    """Decisions in a batch, padding left out."""
    mask = batch.get(("collector", "mask"), None)
    return int(batch.numel() if mask is None else mask.sum())


def main() -> None:
    """Measure what the argument describes."""
    job = Job(**json.loads(sys.argv[1]))
    print(MARK + json.dumps(dataclasses.asdict(measure(job))), flush=True)


if __name__ == "__main__":
    main()
