"""The key figures of a run, and its success by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vla_async.monitor import metric_table as m
from vla_async.monitor.metric import Family
from vla_async.monitor.metrics import mean
from vla_async.report.columns import Columns
from vla_async.report.findings_base import percent, setting, settled, share, values
from vla_async.report.formats import NOTHING, number_text, rate_text, seconds_text
from vla_async.report.run_data import Line, RunData

ALL = "all"  # tasks together


@dataclass(frozen=True)
class Rate:
    """A success rate with its 95 % interval; NaN where it is not known."""

    rate: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.rate + self.low + self.high)

    @property
    def text(self) -> str:
        return rate_text(self.rate)

    @property
    def interval(self) -> str:
        return f"{rate_text(self.low)} to {rate_text(self.high)}" if self.is_known else NOTHING


@dataclass(frozen=True)
class Figure:
    """A figure on a tile.

    Attributes:
        name: what it is.
        value: the figure, with its unit.
        detail: what it rests on.
        rate: the success rate that is drawn below it, if it is one.
        bars: shares of the time, drawn as bars instead of a figure: a name and a share for each.
    """

    name: str
    value: str
    detail: str = ""
    rate: Rate | None = None
    bars: list[tuple[str, float]] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return self.value != NOTHING


@dataclass(frozen=True)
class TaskRow:
    """Success in one task, or in all of them."""

    task: str
    episodes: str
    once: Rate
    at_end: Rate
    first: Rate  # success_once of the first evaluation
    episode_return: str


def key_figures(run: RunData) -> list[Figure]:
    """What is read first; always the same names in the same order, with a dash for what the run has not logged."""
    return [_success(run), _throughput(run), _trained(run), _time(run), _staleness(run), busy(run)]


def _success(run: RunData) -> Figure:
    rows = task_rows(run)
    if not rows:
        trained = run.last(m.ROLLOUT_SUCCESS_ONCE.of())
        return Figure("Success", rate_text(trained), "while training; no evaluation" if math.isfinite(trained) else "")
    row = rows[-1]
    detail = f"95 %: {row.once.interval}, n = {row.episodes}"
    if math.isfinite(row.first.rate):
        detail += f"; first {row.first.text}"
    return Figure("Success", row.once.text, detail, row.once)


def _throughput(run: RunData) -> Figure:
    """Over the run but its first update, for which processes have to start."""
    if len(run.updates) < 2 or not run.last(m.ENV_STEPS) > 0:
        return Figure("Throughput", NOTHING)
    first, last = run.updates[0], run.updates[-1]
    seconds = last.get(m.ELAPSED_S, math.nan) - first.get(m.ELAPSED_S, math.nan)
    steps = last.get(m.ENV_STEPS, math.nan) - first.get(m.ENV_STEPS, math.nan)
    rate = steps / seconds if seconds > 0 else math.nan
    return Figure("Throughput", number_text(rate), "env steps/s, after the first update")


def _trained(run: RunData) -> Figure:
    steps, episodes = run.last(m.ENV_STEPS), run.last(m.EPISODES)
    updates = number_text(run.updates[-1].get(m.STEP, len(run.updates))) if run.updates else NOTHING
    if not steps > 0:
        return Figure("Trained on", updates, "optimizer steps on demonstrations" if run.updates else "")
    episodes_text = f", {number_text(episodes)} episodes" if episodes > 0 else ""
    return Figure("Trained on", number_text(steps), f"env steps; {updates} updates{episodes_text}")


def _time(run: RunData) -> Figure:
    return Figure("Training time", seconds_text(run.last(m.ELAPSED_S)), "evaluations in turn left out")


def _staleness(run: RunData) -> Figure:
    average = mean(values(run.updates, m.STALENESS_MEAN))
    largest, bound = max(values(run.updates, m.STALENESS_MAX), default=math.nan), run.last(m.STALENESS_BOUND)
    if math.isnan(average) and largest == 0:
        average = 0.0  # a loop whose data is never old says no more
    text = NOTHING if math.isnan(average) else f"{average:.2f}"
    known = [
        f"{name} {number_text(value)}" for name, value in (("largest", largest), ("bound", bound)) if math.isfinite(value)
    ]
    return Figure("Mean staleness", text, ", ".join(["updates", *known]) if known else "")


def busy(run: RunData) -> Figure:
    """The shares of the time in which each role was busy; after the warm-up if a run is long enough, as in the findings."""
    lines = settled(run) or run.updates
    roles = (("env workers", m.WORKER_IDLE), ("replicas", m.REPLICA_IDLE), ("trainer", m.TRAINER_IDLE))
    bars = [(name, 1 - idle) for name, metric in roles if math.isfinite(idle := share(lines, metric))]
    text = " · ".join(f"{name} {percent(part)}" for name, part in bars)
    return Figure("Busy", text or NOTHING, bars=bars)


def task_rows(run: RunData) -> list[TaskRow]:
    """Success of the last evaluation in each task, and in all of them as the last row; none without an evaluation."""
    if not run.evaluations:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    found = Columns([last]).matching(m.SUCCESS_ONCE)
    splits = {labels["split"] for labels in found.values()}
    if not splits:
        return []
    split = min(splits)
    tasks = [labels["task"] for labels in found.values() if labels["split"] == split]
    several = sorted(task for task in tasks if task)
    only = setting(run, "env.task")  # what a run of one task calls it
    whole = only if not several and isinstance(only, str) else ALL
    return [_task_row(task, split, first, last, task or whole) for task in [*several, ""]]


def _task_row(task: str, split: str, first: Line, last: Line, name: str) -> TaskRow:
    parts = (split, task) if task else (split,)

    def value(line: Line, family: Family) -> float:
        return line.get(family.of(*parts), math.nan)

    def rate(line: Line, families: Sequence[Family]) -> Rate:
        return Rate(*(value(line, family) for family in families))

    once = (m.SUCCESS_ONCE, m.SUCCESS_ONCE_LOW, m.SUCCESS_ONCE_HIGH)
    at_end = (m.SUCCESS_AT_END, m.SUCCESS_AT_END_LOW, m.SUCCESS_AT_END_HIGH)
    return TaskRow(
        task=name,
        episodes=number_text(value(last, m.EVALUATED_EPISODES)),
        once=rate(last, once),
        at_end=rate(last, at_end),
        first=rate(first, once) if first is not last else Rate(),
        episode_return=number_text(value(last, m.EVALUATED_RETURN)),
    )
