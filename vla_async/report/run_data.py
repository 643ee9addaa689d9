"""``RunData``: the files of a run directory, as the report and the findings read them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vla_async.refusals import ConfigError

METRICS = "metrics.csv"
Line = dict[str, float]  # a line of metrics.csv: name to value, empty cells left out
_BEGINNING: Line = {"env_steps": 0.0, "episodes": 0.0, "elapsed_s": 0.0}  # of an evaluation before the first update


@dataclass(frozen=True)
class RunData:
    """What one run has left.

    Attributes:
        path: the run directory.
        updates: the lines of metrics.csv that end an update (or a step of ``sft``), in their order.
        evaluations: the lines that hold an evaluation; one may be the line of an update too.
        config: config.yaml; empty if there is none.
        config_text: config.yaml as it is written, comments and all.
        environment: environment.json: versions and hardware; empty if there is none.
        timeline: timeline.json, if there is one.
        videos: mp4 files of evaluations, by name.
        trajectories: saved trajectories, by name; the video of one has the same name and the ending mp4.
    """

    path: Path
    updates: list[Line]
    evaluations: list[Line]
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    timeline: Path | None = None
    videos: list[Path] = field(default_factory=list)
    trajectories: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For a legend: the name of the run and its time."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def command(self) -> str:
        """The command line of the run, with which config.yaml begins; empty for a run from Python."""
        first = self.config_text.partition("\n")[0]
        return first.removeprefix("# ") if first.startswith("# vla-async ") else ""

    def column(self, name: str) -> list[float]:
        """A metric of each update; NaN where it was not logged."""
        return [line.get(name, math.nan) for line in self.updates]

    def last(self, name: str) -> float:
        """The last value of a metric that was logged, of updates or evaluations; NaN if there is none."""
        lines = [*self.evaluations, *self.updates]
        return next((line[name] for line in reversed(lines) if name in line), math.nan)


def find_run(run: str, root: Path = Path("runs")) -> Path:
    """The directory of a run.

    Args:
        run: a run directory; or a directory of several, or the name of one below ``root``, for the newest run in it.
        root: directory of all runs.

    Raises:
        ConfigError: if there is no such run.
    """
    places = [Path(run), *([] if Path(run).is_absolute() else [root / run])]
    for place in places:
        if (place / METRICS).is_file():
            return place
        newest = max(place.glob(f"*/{METRICS}"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            return newest.parent
    names = sorted({path.parents[1].name for path in root.glob(f"*/*/{METRICS}")})
    there = f"\n  runs below {root}: {', '.join(names)}" if names else ""
    looked = " nor ".join(map(str, places))
    raise ConfigError(f"no run in {looked}: give the directory of a run, which holds {METRICS}, or its name{there}")


def read_run(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        ConfigError: if it is none, or a file of it cannot be read.
    """
    if not (path / METRICS).is_file():
        raise ConfigError(
            f"{path} has no {METRICS}; give the directory of a run, for example runs/toy_ppo/2026-01-31_12-00-00"
        )
    lines = _read_metrics(path / METRICS)
    timeline = path / "timeline.json"
    config_text = _text(path / "config.yaml")
    return RunData(
        path=path,
        updates=[line for line in lines if "lr" in line],
        evaluations=[_BEGINNING | line if line.get("step") == 0 else line for line in lines if _is_evaluation(line)],
        config=_parsed(path / "config.yaml", config_text, yaml.safe_load, yaml.YAMLError),
        config_text=config_text,
        environment=_parsed(path / "environment.json", _text(path / "environment.json"), json.loads, ValueError),
        timeline=timeline if timeline.is_file() else None,
        videos=sorted((path / "videos").glob("*.mp4")),
        trajectories=sorted((path / "trajectories").glob("**/*.pt")),
    )


def _is_evaluation(line: Line) -> bool:
    return any(name.endswith("/success_once") and not name.startswith("rollout/") for name in line)


def _read_metrics(path: Path) -> list[Line]:
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}; is it a run's?") from error
    if not text.endswith("\n"):
        text = text[: max(text.rfind(","), text.rfind("\n")) + 1]  # a killed run's: of a last number, digits may be missing
    rows = csv.reader(text.splitlines())
    names = next(rows, [])
    try:
        return [{name: float(cell) for name, cell in zip(names, row, strict=False) if cell} for row in rows]
    except ValueError as error:
        raise ConfigError(
            f"{path}, line {rows.line_num}: {error}; is it a run's? If the run is writing it just now, try again"
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text() if path.is_file() else ""
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is no text: {problem}; mend it, or move it away to go on without") from problem


def _parsed(path: Path, text: str, parse: Callable[[str], Any], error: type[Exception]) -> dict[str, Any]:
    """The mapping that a file holds; empty if there is no file, or something else in it."""
    try:
        content = parse(text) if text else {}
    except error as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; mend it, or move it away to go on without") from problem
    return content if isinstance(content, dict) else {}
