"""Findings about the machinery: workers that failed, trajectories that were lost, memory that grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from vla_async.monitor.metric_table import (
    CUT,
    DROPPED,
    PRODUCED,
    REPLICAS_MIB,
    TRAINER_MIB,
    WORKER_RESTARTS,
    WORKERS_MIB,
)
from vla_async.monitor.metrics import mean
from vla_async.report.findings_base import Finding, Kind, percent, settled, values
from vla_async.report.run_data import RunData

MANY_DROPPED = 0.05  # of all trajectories: as much of the simulators' time was for nothing
MANY_CUT = 0.25  # of all trajectories: as many have a bootstrap value in place of what would have come
PARTS = 4  # into which the run is cut to see whether memory goes on growing; what is kept from reuse stops by then
LEAST_IN_PART = 4  # updates: one that is out of the ordinary then does not decide
GROWTH = 0.1  # of what it was, and at least
GROWTH_MIB = 64.0  # which allocators keep or give back as they like

_KEEP = {  # by reason: what keeps these trajectories
    "stale": "they were older than fit_loop.max_staleness allows, as after that was lowered or a run was resumed",
    "straggler": "fit_loop.straggler=wait or cut keeps them",
    "worker ended": "they were under way in workers that failed",
    "resume": "fit_loop.in_flight=save keeps what is finished when a checkpoint is written",
}


def restarts(run: RunData) -> Iterator[Finding]:
    """Workers that failed and were replaced."""
    number = run.last(WORKER_RESTARTS)
    if number > 0:
        often = "once" if number == 1 else f"{number:.0f} times"
        text = (
            f"Workers failed and were replaced {often}. What they failed with stands in the run's output; an env that is "
            "only slow needs a longer fit_loop.env_timeout_s."
        )
        yield Finding("problem", text, f"{WORKER_RESTARTS} > 0")


def dropped(run: RunData) -> Iterator[Finding]:
    """Trajectories that were thrown away, by reason."""
    produced, last = run.last(PRODUCED), run.updates[-1] if run.updates else {}
    for name, number in last.items():
        labels = DROPPED.labels_of(name)
        if labels is None or not number > 0.0 or not produced > 0.0:
            continue
        kind: Kind = "problem" if number >= MANY_DROPPED * produced else "note"
        why = _KEEP.get(labels["reason"], "")
        text = (
            f"{number:,.0f} of {produced:,.0f} trajectories ({percent(number / produced)}) were thrown away as "
            f"“{labels['reason']}”{': ' if why else ''}{why}."
        )
        rule = f"{name} > 0 (a problem from {percent(MANY_DROPPED)} of {PRODUCED} on)"
        yield Finding(kind, text, rule)


def cut(run: RunData) -> Iterator[Finding]:
    """Fragments that were ended early."""
    number, produced = run.last(CUT), run.last(PRODUCED)
    if produced > 0.0 and number >= MANY_CUT * produced:
        text = (
            f"{percent(number / produced)} of the trajectories were cut, as they would have become too old. Shorter "
            "fragments (fit_loop.decisions_per_env) end by themselves; fit_loop.straggler=wait waits for them."
        )
        yield Finding("note", text, f"{CUT} >= {percent(MANY_CUT)} of {PRODUCED}")


def memory(run: RunData) -> Iterator[Finding]:
    """Memory that grows to the end of the run."""
    whose = {TRAINER_MIB: "trainer", WORKERS_MIB: "env workers", REPLICAS_MIB: "replicas"}
    for name, who in whose.items():
        used = values(settled(run), name)
        if len(used) >= PARTS * LEAST_IN_PART and grows(used):
            per_update = (used[-1] - used[0]) / (len(used) - 1)
            text = (
                f"The memory of the {who} grows steadily, from {used[0]:,.0f} to {used[-1]:,.0f} MiB, about "
                f"{per_update:.2g} MiB per update: something is kept that should not be. A long run may end for want of "
                "memory; until the cause is found, resume it from time to time (--ckpt_path last)."
            )
            rule = (
                f"{name} is higher in each quarter of the run than in the one before it, to the end, and grew by "
                f"{GROWTH_MIB:.0f} MiB and {percent(GROWTH)} or more"
            )
            yield Finding("problem", text, rule)


def grows(used: Sequence[float]) -> bool:
    """Whether numbers rise steadily and by much: in each part, and in the last part not less than half as fast."""
    size = len(used) / PARTS
    levels = [mean(used[math.floor(part * size) : math.floor((part + 1) * size)]) for part in range(PARTS)]
    rises = [after - before for before, after in itertools.pairwise(levels)]
    total = levels[-1] - levels[0]
    return min(rises) > 0.0 and rises[-1] >= mean(rises) / 2 and total >= max(GROWTH_MIB, GROWTH * levels[0])


MACHINERY_RULES = (restarts, dropped, cut, memory)
