"""What Tmax does to throughput, to the size of batches and to waits, for two loads with 16 envs.

    python -m benchmarks.tmax --seconds 4 --out docs/images/tmax.png

Under jitter (env steps of 2 to 20 ms) requests come one by one; envs that take no time all ask again as soon as they are
answered. The emulated device sleeps, so two cores are enough.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_async.collectors import StreamingCollector
from vla_async.emulation import Constant, Duration, EmulatedEnvs, EmulatedPolicy, Uniform, ideal_rate

NUM_ENVS, DECISIONS = 16, 32
WARM_UP_S = 0.5


@dataclass(frozen=True)
class Load:
    """Envs, and what a forward costs: ``flat_s + per_row_s * rows`` seconds."""

    about: str
    step_time: Duration
    flat_s: float
    per_row_s: float = 0.0

    @property
    def ideal(self) -> float:
        """Env steps/s without any overhead, with a device that never waits for more requests."""
        return ideal_rate(NUM_ENVS, self.step_time, self.flat_s, self.per_row_s, seconds=100.0)


LOADS = {
    "jitter": Load("steps of 2 to 20 ms, forward 5 ms + 0.1 ms per row", Uniform(0.002, 0.02), 0.005, 0.0001),
    "instant": Load("steps take no time, forward 5 ms", Constant(), 0.005),
}


@dataclass(frozen=True)
class Point:
    """What was measured at one Tmax.

    Attributes:
        max_wait_ms: Tmax.
        rate: env steps/s.
        rows: mean rows of a batch.
        wait_p50_ms: median of how long a request waited for its batch, from the start on.
        wait_p95_ms: what 95 % of the requests did not exceed.
    """

    max_wait_ms: float
    rate: float
    rows: float
    wait_p50_ms: float
    wait_p95_ms: float


def measure(load: Load, max_wait_ms: float, seconds: float) -> Point:
    """Collect for so many seconds after a warm-up."""
    envs = EmulatedEnvs(num_envs=NUM_ENVS, step_time=load.step_time)
    policy = EmulatedPolicy((envs.chunk_size, envs.action_dim), flat_s=load.flat_s, per_row_s=load.per_row_s)
    collector = StreamingCollector(envs, policy, frames_per_batch=NUM_ENVS * DECISIONS, max_wait_s=max_wait_ms / 1e3)
    try:
        before, began = _collect(collector, WARM_UP_S)
        after, ended = _collect(collector, seconds)
    finally:
        collector.shutdown()
    batches = np.array(after["batch_size/histogram"]) - np.array(before["batch_size/histogram"])
    return Point(
        max_wait_ms=max_wait_ms,
        rate=(after["env_steps"] - before["env_steps"]) / (ended - began),
        rows=float((batches * np.arange(len(batches))).sum() / batches.sum()),
        wait_p50_ms=1e3 * after["request_wait_s/p50"],
        wait_p95_ms=1e3 * after["request_wait_s/p95"],
    )


def _collect(collector: StreamingCollector, seconds: float) -> tuple[dict[str, Any], float]:
    """Take batches for a while; what the collector has done then, and when that was."""
    begin = None
    for _ in collector:
        begin = begin or time.perf_counter()  # after the first batch, for the processes have to start
        if time.perf_counter() - begin >= seconds:
            break
    return collector.stats(), time.perf_counter()


def print_points(name: str, points: Sequence[Point]) -> None:
    """Print a table of one load."""
    load = LOADS[name]
    print(f"\n{name}: {load.about}; ideal {load.ideal:.0f} env steps/s")
    print("Tmax ms   env steps/s   of the ideal   rows per batch   wait p50 ms   wait p95 ms")
    for point in points:
        print(
            f"{point.max_wait_ms:7g}   {point.rate:11.0f}   {point.rate / load.ideal:12.2f}   {point.rows:14.1f}"
            f"   {point.wait_p50_ms:11.1f}   {point.wait_p95_ms:11.1f}"
        )


def save_figure(results: dict[str, list[Point]], path: Path) -> None:
    """Draw throughput and batch size against Tmax."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (rates, sizes) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, points in results.items():
        waits = [point.max_wait_ms for point in points]
        rates.plot(waits, [point.rate / LOADS[name].ideal for point in points], "o-", label=LOADS[name].about)
        sizes.plot(waits, [point.rows for point in points], "o-")
    rates.set_ylabel("env steps/s, share of the ideal")
    sizes.set_ylabel("rows per batch")
    rates.set_ylim(0, 1)
    sizes.set_ylim(0, NUM_ENVS + 1)
    for axes in (rates, sizes):
        axes.axvline(5.0, color="0.7", linestyle=":")
        axes.set_xlabel("Tmax (ms); the dotted line is the forward's 5 ms")
        axes.grid(alpha=0.3)
    figure.legend(*rates.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\n{path}")


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep Tmax for each load."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tmax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--tmax-ms", nargs="+", type=float, default=[0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement")
    parser.add_argument("--out", type=Path, help="file for the figure")
    args = parser.parse_args(argv)
    results = {}
    for name in args.loads:
        results[name] = [measure(LOADS[name], max_wait_ms, args.seconds) for max_wait_ms in args.tmax_ms]
        print_points(name, results[name])
    if args.out is not None:
        save_figure(results, args.out)


if __name__ == "__main__":
    main()
