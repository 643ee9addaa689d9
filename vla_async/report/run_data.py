"""``RunData``: the files of a run directory, as the report and the findings read them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vla_async.refusals import ConfigError

Line = dict[str, float]  # a line of metrics.csv: name to value, empty cells left out


@dataclass(frozen=True)
class RunData:
    """What one run has left.

    Attributes:
        path: the run directory.
        updates: the lines of metrics.csv that end an update (or a step of ``sft``), in their order.
        evaluations: the lines that hold an evaluation; one may be the line of an update too.
        config: config.yaml; empty if there is none.
        environment: environment.json: versions and hardware; empty if there is none.
        timeline: timeline.json, if there is one.
        videos: mp4 files of evaluations, by name.
        trajectories: saved trajectories, by name; the video of one has the same name and the ending mp4.
    """

    path: Path
    updates: list[Line]
    evaluations: list[Line]
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    timeline: Path | None = None
    videos: list[Path] = field(default_factory=list)
    trajectories: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For a legend: the name of the run and its time."""
        return f"{self.path.parent.name}/{self.path.name}"

    def column(self, name: str) -> list[float]:
        """A metric of each update; NaN where it was not logged."""
        return [line.get(name, math.nan) for line in self.updates]

    def last(self, name: str) -> float:
        """The last value of a metric that was logged, of updates or evaluations; NaN if there is none."""
        lines = [*self.evaluations, *self.updates]
        return next((line[name] for line in reversed(lines) if name in line), math.nan)


def read_run(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        ConfigError: if it is none.
    """
    metrics = path / "metrics.csv"
    if not metrics.is_file():
        raise ConfigError(
            f"{path} has no metrics.csv; give the directory of a run, for example runs/toy_ppo/2026-01-31_12-00-00"
        )
    with metrics.open() as file:
        lines = [
            {name: float(value) for name, value in line.items() if name is not None and value}
            for line in csv.DictReader(file)
        ]
    timeline = path / "timeline.json"
    return RunData(
        path=path,
        updates=[line for line in lines if "lr" in line],
        evaluations=[
            line
            for line in lines
            if any(name.endswith("/success_once") and not name.startswith("rollout/") for name in line)
        ],
        config=_mapping(yaml.safe_load((path / "config.yaml").read_text())) if (path / "config.yaml").is_file() else {},
        environment=json.loads((path / "environment.json").read_text()) if (path / "environment.json").is_file() else {},
        timeline=timeline if timeline.is_file() else None,
        videos=sorted((path / "videos").glob("*.mp4")),
        trajectories=sorted((path / "trajectories").glob("**/*.pt")),
    )


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}
