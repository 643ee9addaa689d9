"""Runs that are made up of metrics, and what the findings' rules say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_async.report.findings_base import Finding
from vla_async.report.run_data import Line, RunData

Values = float | Sequence[float]


def make_run(
    metrics: dict[str, Values], number: int = 20, config: dict[str, Any] | None = None, evaluations: Sequence[Line] = ()
) -> RunData:
    """A run of so many updates, in which a metric is the same in all of them, or as listed."""
    lines = [
        {name: float(value if isinstance(value, (int, float)) else value[update]) for name, value in metrics.items()}
        | {"lr": 1e-3}
        for update in range(number)
    ]
    return RunData(Path("runs/name/time"), lines, list(evaluations), config=config or {})


def one(rule: Any, run: RunData) -> Finding | None:
    found = list(rule(run))
    assert len(found) <= 1
    return found[0] if found else None


def kind(rule: Any, metrics: dict[str, Values], **options: Any) -> str | None:
    """Of the rule's one finding; None if it has none."""
    found = one(rule, make_run(metrics, **options))
    return None if found is None else found.kind
