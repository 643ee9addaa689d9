"""``find``: what a run's metrics say in plain sentences, problems first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from vla_async.report.findings_base import Finding, Kind
from vla_async.report.run_data import RunData

__all__ = ["Finding", "find"]


def find(run: RunData) -> list[Finding]:
    """What there is to say about a run: problems, then notes, then what is good, each in the order of the rules.

    Metrics that a run has not logged are no evidence; the rules about them say nothing.
    """
    found = [finding for rule in (restarts,) for finding in rule(run)]
    return sorted(found, key=lambda finding: get_args(Kind).index(finding.kind))


def restarts(run: RunData) -> Iterator[Finding]:
    """Workers that failed and were replaced."""
    number = run.last("worker/restarts")
    if math.isfinite(number) and number > 0:
        yield Finding(
            "problem",
            f"Workers failed and were replaced {number:.0f} times. What they failed with stands in the run's output; "
            "fit_loop.max_restarts is how often each may be.",
            "worker/restarts > 0",
        )
