"""``Columns``: a run's metrics as columns that a chart can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from vla_async.monitor.metric import Family, Metric
from vla_async.monitor.metric_table import ELAPSED_S, ENV_STEPS, STEP
from vla_async.report.run_data import Line, RunData

POINTS = 600  # of a column in a chart: more than a screen shows apart
Source = Literal["updates", "evaluations"]
Values = list[float | None]  # None where nothing was logged, or no finite number


@dataclass(frozen=True)
class Columns:
    """Lines of metrics.csv as columns of at most ``limit`` points.

    Where there are more lines, each point stands for as many successive ones: for their mean; of a maximum or a count since
    the start for the largest, of a minimum for the smallest.

    Args:
        lines: the lines.
        limit: points of a column.
    """

    lines: Sequence[Line]
    limit: int = POINTS

    @property
    def lines_per_point(self) -> int:
        return max(1, -(-len(self.lines) // self.limit))

    @cached_property
    def names(self) -> list[str]:
        """Sorted names of what was logged as a finite number at least once."""
        return sorted({name for line in self.lines for name, value in line.items() if math.isfinite(value)})

    def matching(self, entry: Metric | Family) -> dict[str, dict[str, str]]:
        """The names that belong to an entry of the metric table, each with its free parts."""
        found = ((name, entry.labels_of(name)) for name in self.names)
        return {name: labels for name, labels in found if labels is not None}

    def values(self, name: str, complement: bool = False) -> Values:
        """A column.

        Args:
            name: of the metric.
            complement: 1 minus it: a share of idle time becomes one of busy time.
        """
        column = np.array([line.get(name, np.nan) for line in self.lines], dtype=np.float64)
        column[~np.isfinite(column)] = np.nan
        points = _reduce(column, self.lines_per_point, _reduction(name))
        return [None if np.isnan(value) else float(f"{value:.9g}") for value in (1 - points if complement else points)]

    def x(self) -> dict[str, Values]:
        """What the columns can be drawn against: updates, env steps, seconds of training."""
        return {name: self.values(name) for name in (STEP, ENV_STEPS, ELAPSED_S)}


@dataclass(frozen=True)
class SampledRun:
    """A run for charts.

    Args:
        run: the run.
        label: what it is called in legends.
    """

    run: RunData
    label: str

    @cached_property
    def updates(self) -> Columns:
        return Columns(self.run.updates)

    @cached_property
    def evaluations(self) -> Columns:
        return Columns(self.run.evaluations)

    def source(self, source: Source) -> Columns:
        """The columns of the updates, or of the evaluations."""
        return self.updates if source == "updates" else self.evaluations


def sampled(runs: Sequence[RunData]) -> list[SampledRun]:
    """The runs with labels that tell them apart, as short as they can be."""
    choices = (
        [run.path.resolve().parent.name for run in runs],
        [run.path.resolve().name for run in runs],
        [run.name for run in runs],
        [str(run.path) for run in runs],
    )
    labels = next((names for names in choices if len(set(names)) == len(runs)), choices[-1])
    return [SampledRun(run, label) for run, label in zip(runs, labels, strict=True)]


def _reduction(name: str) -> Literal["max", "min", "mean"]:
    kind = name.rpartition("/")[2]
    if kind in ("max", "p99", STEP, ENV_STEPS, ELAPSED_S, "restarts", "produced", "consumed", "cut"):
        return "max"
    return "min" if kind == "min" else "mean"


def _reduce(column: np.ndarray, per_point: int, how: Literal["max", "min", "mean"]) -> np.ndarray:
    """``[n]`` to ``[ceil(n / per_point)]``; what is NaN does not count, unless there is nothing else."""
    points = -(-len(column) // per_point)
    padded = np.full(points * per_point, np.nan)
    padded[: len(column)] = column
    grid = padded.reshape(points, per_point)
    if how != "mean":
        reduced: np.ndarray = (np.fmax if how == "max" else np.fmin).reduce(grid, axis=1)
        return reduced
    counts = np.isfinite(grid).sum(axis=1)
    return np.where(counts > 0, np.nansum(grid, axis=1) / np.maximum(counts, 1), np.nan)
