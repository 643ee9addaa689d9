"""What a run of ``fit`` did, read from its ``metrics.csv``, and tables of such figures."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vla_async.monitor import metric_table as names

if TYPE_CHECKING:
    from vla_async.monitor.report import Table


@dataclass(frozen=True)
class Figures:
    """What one run did after its first updates. NaN is what its loop does not log.

    Attributes:
        env_steps_per_s: env steps trained on per second of wall clock, validation left out.
        update_s: seconds per update.
        wait_s: seconds per update in which the trainer had nothing to train on.
        last_arrival_to_step_s: from when the trainer had the last trajectory of an update to the end of the first epoch.
        worker_idle: share of the time in which the env workers waited for decisions or slots.
        replica_idle: share of the time in which the replicas had no request.
        trainer_idle: share of the time in which the trainer had no data.
        staleness_mean: of the trajectories that were trained on.
        staleness_max: of the trajectories that were trained on.
        success: success_once of the last validation.
    """

    env_steps_per_s: float
    update_s: float
    wait_s: float
    last_arrival_to_step_s: float
    worker_idle: float
    replica_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: float
    success: float


def read_figures(metrics: Path, skip: int) -> Figures:
    """What a run's ``metrics.csv`` says of the updates after the first ``skip``."""
    with metrics.open() as file:
        lines = [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]
    updates = [line for line in lines if names.ENV_STEPS_PER_S in line]
    first, last, kept = updates[skip - 1], updates[-1], updates[skip:]
    elapsed = last[names.ELAPSED_S] - first[names.ELAPSED_S]
    success = names.SUCCESS_ONCE.of("validate")

    def values(name: str) -> list[float]:
        return [line.get(name, math.nan) for line in kept]

    def share(name: str) -> float:  # of the time, so that a long update counts for more
        times = values(names.UPDATE_S)
        return sum(part * time for part, time in zip(values(name), times, strict=True)) / sum(times)

    return Figures(
        env_steps_per_s=(last[names.ENV_STEPS] - first[names.ENV_STEPS]) / elapsed,
        update_s=elapsed / len(kept),
        wait_s=statistics.mean(values(names.WAIT_S)),
        last_arrival_to_step_s=statistics.median(values(names.LAST_ARRIVAL_TO_STEP_S)),
        worker_idle=share(names.WORKER_IDLE),
        replica_idle=share(names.REPLICA_IDLE),
        trainer_idle=share(names.TRAINER_IDLE),
        staleness_mean=statistics.mean(values(names.STALENESS_MEAN)),
        staleness_max=max(values(names.STALENESS_MAX)),
        success=[math.nan, *(line[success] for line in lines if success in line)][-1],
    )


def median(runs: Sequence[Figures]) -> Figures:
    """Each figure's median over runs."""
    return Figures(**{f.name: statistics.median(getattr(run, f.name) for run in runs) for f in dataclasses.fields(Figures)})


def ablation_table(results: Mapping[str, Sequence[Figures]], title: str) -> Table:
    """The medians, each row's rate relative to the first one's."""
    from vla_async.monitor.report import Table

    header = ["", "env steps/s", "vs first", "idle: env workers", "replicas", "trainer", "staleness mean", "max", "success"]
    table, base = Table(header, title=title), median(next(iter(results.values())))
    for name, runs in results.items():
        row = median(runs)
        idle = [_text(share, ".0%") for share in (row.worker_idle, row.replica_idle, row.trainer_idle)]
        age = [_text(row.staleness_mean, ".2f"), _text(row.staleness_max, ".0f")]
        gain = f"{row.env_steps_per_s / base.env_steps_per_s - 1.0:+.0%}"
        table.rows.append([name, f"{row.env_steps_per_s:,.1f}", gain, *idle, *age, _text(row.success, ".2f")])
    return table


def _text(value: float, how: str) -> str:
    return "–" if math.isnan(value) else format(value, how)


def to_json(results: Mapping[str, Sequence[Figures]]) -> dict[str, list[dict[str, float | None]]]:
    """All figures as JSON can hold them: null for what was not logged."""
    return {
        name: [{key: None if math.isnan(value) else value for key, value in vars(run).items()} for run in runs]
        for name, runs in results.items()
    }
