"""The figures of one case as a table."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

_COLUMNS = ("env steps/s", "spread", "of ideal", "delivered", "wait p50/p95 ms", "cores", "PSS MB", "start s", "stop s")


def print_table(case: str, about: str, ideal: float | None, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians over the repeats, with the range of the rate; what failed is said below."""
    bound = "" if ideal is None or math.isinf(ideal) else f"; ideal {ideal:.0f} env steps/s"
    table = Table("collector", *_COLUMNS, title=f"{case}: {about}{bound}", title_justify="left")
    notes = []
    for name, repeats in runs.items():
        good = [run for run in repeats if "error" not in run]
        notes += [f"{name}: {run.get('error') or run['problem']}" for run in repeats if "error" in run or "problem" in run]
        notes += _extras(name, good)
        table.add_row(name, *(_row(good, ideal) if good else ["failed", *[""] * (len(_COLUMNS) - 1)]))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    for note in dict.fromkeys(notes):
        console.print(f"  {note}", markup=False, soft_wrap=True)


def _row(runs: list[dict[str, Any]], ideal: float | None) -> list[str]:
    rates = [run["rate"] for run in runs]
    rate = statistics.median(rates)
    waits = [_median(runs, key) for key in ("wait_p50_ms", "wait_p95_ms")]
    return [
        f"{rate:.0f}",
        f"{min(rates):.0f}-{max(rates):.0f}",
        "-" if ideal is None or math.isinf(ideal) else f"{rate / ideal:.1%}",
        f"{statistics.median(run['delivered'] / run['rate'] for run in runs):.0%}",
        "-" if None in waits else "/".join(f"{wait:.1f}" for wait in waits),
        f"{_median(runs, 'cores'):.2f}",
        f"{_median(runs, 'pss_mb'):.0f}",
        f"{_median(runs, 'start_s'):.1f}",
        f"{_median(runs, 'stop_s'):.1f}",
    ]


def _median(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if run[key] is not None]
    return statistics.median(values) if values else None


def _extras(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """What only some measurements have: publications of weights, and memory through a long run."""
    notes = []
    if any(run["publishes"] for run in runs):
        times = f"{_median(runs, 'publishes'):.0f} times, {_median(runs, 'publish_ms'):.0f} ms each"
        notes.append(f"{name}: weights were published {times}")
    for run in runs:
        if len(run["memory"]) > 1:
            seconds, megabytes = np.array(run["memory"]).T
            slope = 60.0 * np.polyfit(seconds, megabytes, 1)[0]
            notes.append(f"{name}: PSS {megabytes[0]:.0f} MB at first, {megabytes[-1]:.0f} at last, {slope:+.2f} MB/min")
    return notes
