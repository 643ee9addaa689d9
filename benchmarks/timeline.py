"""What the timeline costs: the same run with and without it, by turns, and what one record takes.

    python -m benchmarks.timeline --repeats 4 --json timeline.json

The run is the LIBERO-like one of ``benchmarks.overlap``: a process per env, emulated costs, all levels of asynchrony on.
Every run is a ``vla-async fit`` in a process of its own; figures are medians over the repeats. The whole takes less than
three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap_cases import LIBERO, SPLIT
from vla_async.ablation import Row, ablation_rows, measure
from vla_async.monitor.figures import median, to_json
from vla_async.monitor.report import Table
from vla_async.monitor.timeline_run import WORKER, Timeline
from vla_async.monitor.timeline_track import CAPACITY, Kind, clock

GOAL = 0.02  # of the rate that a run may lose
OFF, ON = "without a timeline", "with a timeline"


def cost_of_a_record(directory: Path) -> tuple[float, float]:
    """CPU seconds that a record takes its process, and that it takes the trainer to write it."""
    timeline = Timeline(True)
    timeline.open(directory)
    track, now = timeline.track(WORKER), clock()
    assert track is not None
    began = time.process_time()
    for number in range(CAPACITY):
        track.add(Kind.ENV_STEPS, now, now, number, 1, 5)
    made = time.process_time()
    timeline.close()
    return (made - began) / CAPACITY, (time.process_time() - made) / CAPACITY


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and save the figures if asked."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=12, help="per run; the first quarter does not count")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}; {LIBERO.about}", flush=True)
    switches = ablation_rows(SPLIT)[-1].overrides
    rows = [Row(OFF, switches), Row(ON, (*switches, "--trainer.timeline=true"))]
    with tempfile.TemporaryDirectory() as directory:
        config = LIBERO.config("StreamingFitLoop", args.updates)
        runs = measure(rows, config, Path(directory), args.repeats, say=lambda text: print(text, flush=True))
        made_s, written_s = cost_of_a_record(Path(directory))
        (file, *_) = Path(directory).glob("with-a-timeline-*/*/timeline.json")
        records = file.read_text().count('"ph":"X"') / args.updates
    table = Table(["", "env steps/s", "all runs", "s per update"], title=f"goal: less than {GOAL:.0%} slower with it")
    for name, found in runs.items():
        rates = ", ".join(f"{run.env_steps_per_s:.1f}" for run in found)
        table.rows.append([name, f"{median(found).env_steps_per_s:.1f}", rates, f"{median(found).update_s:.3f}"])
    table.print()
    off, on = (median(runs[name]) for name in (OFF, ON))
    slower = 1.0 - on.env_steps_per_s / off.env_steps_per_s
    busy = records * (made_s + written_s) / on.update_s
    print(f"slow-down: {slower:+.2%} of the rate, by medians")
    print(f"a record: {1e6 * made_s:.2f} µs to make, {1e6 * written_s:.2f} µs to write")
    print(f"of this run's {records:.0f} slices per update: {busy:.3%} of one core")
    results: dict[str, Any] = {"cores": os.cpu_count(), "load before": load, "runs": to_json(runs), "slow_down": slower}
    results |= {"record_s": made_s, "written_s": written_s, "slices_per_update": records, "share_of_a_core": busy}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
