"""What overlapping rollouts and training gains, on emulated costs, beside the goals.

    python -m benchmarks.overlap --parts ratios streamer libero maniskill --repeats 3 --json overlap.json

- ``ratios``: the speed-up over the synchronous loop for three ratios of rollout R to training T, beside (R + T) / max(R, T).
- ``streamer``: how long after the last trajectory of an update its optimizer step comes.
- ``libero``, ``maniskill``: the five rows of the ablation, on equally many devices.

Every run is a ``vla-async fit`` in a process of its own; figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap_cases import (
    LIBERO,
    MANISKILL,
    MANISKILL_HEAVY,
    RATIOS,
    SPLIT,
    STREAMING,
    Case,
    ratio_case,
    recommended,
    rows,
)
from vla_async.ablation import Row, ablation_rows, measure
from vla_async.core_math import async_speedup
from vla_async.monitor.figures import Figures, ablation_table, median, to_json
from vla_async.monitor.report import Table

PARTS = ("ratios", "streamer", "libero", "maniskill")
SPEEDUP_GOAL, LATENCY_GOAL, LIBERO_GOAL = 0.95, 1.2, 0.85
_FULL = ablation_rows(SPLIT)[-1]
_OFF = dataclasses.replace(ablation_rows(SPLIT)[1], name="synchronous")


@dataclasses.dataclass
class Session:
    """What all measurements share.

    Attributes:
        updates: per run; the first quarter does not count.
        repeats: runs of each row.
        directory: for their files.
    """

    updates: int
    repeats: int
    directory: Path

    def measure(
        self, name: str, case: Case, of: Sequence[Row], loop: str = "StreamingFitLoop", **settings: Any
    ) -> dict[str, list[Figures]]:
        """Run rows on a case."""
        directory = self.directory / name
        directory.mkdir()
        print(f"{name}: {case.about}", flush=True)
        config = case.config(loop, self.updates, **settings)
        return measure(of, config, directory, self.repeats, say=lambda text: print(text, flush=True))


def ratios(session: Session) -> dict[str, Any]:
    """Speed-up over the faster of the two synchronous loops: the plain one, and the streaming one with all switches off."""
    header = [
        "rollout : training",
        "R + T s",
        "SyncFitLoop s",
        "all off s",
        "asynchronous s",
        "speed-up",
        "bound",
        "reached",
    ]
    table = Table(header, title=f"seconds per update; goal: at least {SPEEDUP_GOAL} of the bound")
    found: dict[str, Any] = {}
    for ratio, (rollout_s, train_s) in RATIOS.items():
        name, case = ratio.replace(":", "-"), ratio_case(rollout_s, train_s)
        # envs without jitter ask almost together; those that are not answered together take turns for ever
        wait_s = case.act_flat_s / 4
        full = dataclasses.replace(_FULL, name="asynchronous")
        runs = session.measure(name, case, [_OFF, full], max_wait_s=wait_s)
        runs |= session.measure(f"{name}-plain", case, [Row("SyncFitLoop", ())], loop="SyncFitLoop")
        plain, off, overlapped = (median(runs[row]).update_s for row in ("SyncFitLoop", "synchronous", "asynchronous"))
        bound, speedup = async_speedup(rollout_s, train_s), min(plain, off) / overlapped
        seconds = [f"{value:.3f}" for value in (rollout_s + train_s, plain, off, overlapped)]
        table.rows.append([ratio, *seconds, f"{speedup:.2f}", f"{bound:.2f}", f"{speedup / bound:.1%}"])
        found[ratio] = {"runs": to_json(runs), "speedup": speedup, "bound": bound, "reached": speedup / bound}
    table.print()
    return found


def streamer(session: Session) -> dict[str, Any]:
    """The optimizer step comes one micro-batch after the last trajectory, not one epoch after it."""
    without = Row("without", (*_FULL.overrides, "--trainer.fit_loop.streamer=false"))
    runs = session.measure("streamer", STREAMING, [dataclasses.replace(_FULL, name="with"), without])
    case, on, off = STREAMING, median(runs["with"]), median(runs["without"])
    ratio = on.last_arrival_to_step_s / case.micro_batch_s
    table = Table(
        ["", "seconds", "micro-batches"], title=f"last trajectory to step; goal: at most {LATENCY_GOAL} micro-batches"
    )
    epoch_s = off.update_s - off.wait_s
    for name, seconds in {"with the streamer": on.last_arrival_to_step_s, "without": epoch_s}.items():
        table.rows.append([name, f"{seconds:.3f}", f"{seconds / case.micro_batch_s:.2f}"])
    table.print()
    return {"runs": to_json(runs), "micro_batch_s": case.micro_batch_s, "micro_batches": ratio}


def libero(session: Session) -> dict[str, Any]:
    """The five rows where every env has a process and a pace of its own."""
    runs = session.measure("libero", LIBERO, rows(LIBERO))
    ablation_table(runs, f"{LIBERO.about}; goal: the full system at least +{LIBERO_GOAL:.0%} over co-located").print()
    return {"runs": to_json(runs)}


def maniskill(session: Session) -> dict[str, Any]:
    """The five rows where all envs are one batch, and what is recommended there."""
    runs = session.measure("maniskill", MANISKILL, [*rows(MANISKILL), recommended()])
    heavy = session.measure("heavy", MANISKILL_HEAVY, [rows(MANISKILL_HEAVY)[0], recommended()])
    goal = "goal: the recommended switches never below co-located"
    ablation_table(runs, f"{MANISKILL.about}; {goal}").print()
    ablation_table(heavy, f"{MANISKILL_HEAVY.about}; {goal}").print()
    return {"runs": to_json(runs), "heavy": to_json(heavy)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts, print a table for each, and save all figures if asked."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--updates", type=int, default=10, help="per run; the first quarter does not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args(argv)
    parts = {"ratios": ratios, "streamer": streamer, "libero": libero, "maniskill": maniskill}
    results: dict[str, Any] = {"cores": os.cpu_count(), "load before": os.getloadavg()[0]}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        for part in args.parts:
            place = Path(directory) / part
            place.mkdir()
            results[part] = parts[part](Session(args.updates, args.repeats, place))
            if args.json:  # after each part, so that an interrupt loses one at most
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
