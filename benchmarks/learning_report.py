"""Statistics, tables and figures of the comparison in ``sample_efficiency.py``.

A *band* is a 95 % confidence interval of a mean over seeds. For a success rate it is never narrower than what so many
episodes can tell: where all seeds agree, at no success or at nothing else, Student's interval has no width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learning_cases import Setting
from vla_async.monitor.metrics import wilson_interval
from vla_async.monitor.report import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_SYNC = "#374151"
_COLOURS = {1: "#1f6fb2", 2: "#2a9d6f", 4: "#d9822b", 8: "#b83232"}


@dataclass(frozen=True)
class Band:
    """A mean with its interval."""

    mean: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def text(self, sign: str = "") -> str:
        """For example ``0.75 [0.70, 0.80]``."""
        return f"{self.mean:{sign}.2f} [{self.low:{sign}.2f}, {self.high:{sign}.2f}]"


def band(values: Sequence[float]) -> Band:
    """Mean and 95 % interval by Student's t; of a single value, the interval is unbounded."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Band(mean, -math.inf, math.inf)
    quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else _T[-1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Band(mean, mean - half, mean + half)


def success_band(successes: Sequence[int], episodes: int) -> Band:
    """Of the success rates of several seeds; see the module.

    Args:
        successes: of each seed.
        episodes: that each seed was evaluated on.
    """
    over_seeds = band([number / episodes for number in successes])
    low, high = wilson_interval(sum(successes), episodes * len(successes))
    return Band(over_seeds.mean, max(0.0, min(over_seeds.low, low)), min(1.0, max(over_seeds.high, high)))


def area(points: Sequence[Record]) -> float:
    """Mean success between the first mark and the last, by trapezoids: 1 for a policy that always succeeds."""
    marks, rates = [point["mark"] for point in points], [point["successes"] / point["episodes"] for point in points]
    parts = [(marks[i + 1] - marks[i]) * (rates[i] + rates[i + 1]) / 2 for i in range(len(points) - 1)]
    return sum(parts) / (marks[-1] - marks[0])


def difference(records: Sequence[Record], base: Sequence[Record]) -> Band:
    """Of the areas of two settings, paired by seed.

    Raises:
        ValueError: if they share no seed.
    """
    other = {record["seed"]: area(record["points"]) for record in base}
    pairs = [area(record["points"]) - other[record["seed"]] for record in records if record["seed"] in other]
    if not pairs:
        raise ValueError("the two settings have no seed in common")
    return band(pairs)


@dataclass(frozen=True)
class Curve:
    """All seeds of one setting."""

    eta: int
    correction: str
    name: str
    records: list[Record]

    @property
    def marks(self) -> list[int]:
        """The env steps at which it was evaluated."""
        return [point["mark"] for point in self.records[0]["points"]]

    @property
    def bands(self) -> list[Band]:
        """Success at each mark."""
        columns = zip(*(record["points"] for record in self.records), strict=True)
        return [success_band([point["successes"] for point in column], column[0]["episodes"]) for column in columns]

    @property
    def area(self) -> Band:
        """Of the areas under the seeds' curves."""
        return band([area(record["points"]) for record in self.records])

    @property
    def staleness(self) -> tuple[float, float]:
        """Mean and max over the seeds."""
        means = statistics.fmean(record["staleness_mean"] for record in self.records)
        return means, max(record["staleness_max"] for record in self.records)


def curves(records: Iterable[Record], pace: str = "full_age") -> list[Curve]:
    """One per setting: the synchronous one first, then by correction and η."""
    found: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        if record["pace"] == pace:
            found.setdefault((record["eta"], record["correction"]), []).append(record)
    ordered = sorted(found, key=lambda key: (key[0] > 0, key[1] != "none", key[1], key[0]))
    return [Curve(*key, _name(found[key][0]), sorted(found[key], key=lambda record: int(record["seed"]))) for key in ordered]


def _name(record: Record) -> str:
    names = ("task", "eta", "correction", "seed", "pace")
    return Setting(**{name: record[name] for name in names}).name


def learning_table(about: str, found: Sequence[Curve]) -> Table:
    """Success at every other mark, the area beside the synchronous one's, and the age of the data."""
    sync, shown = found[0], range(len(found[0].marks) - 1, 0, -2 if len(found[0].marks) > 6 else -1)
    columns = sorted(shown)
    header = ["", "seeds", *(f"{sync.marks[i]:,}" for i in columns), "area", "less synchronous", "marks in its band"]
    table = Table([*header, "staleness mean", "max"], title=f"{about}: success by env steps, mean and 95 % over seeds")
    for curve in found:
        row = [curve.name, str(len(curve.records)), *(curve.bands[i].text() for i in columns), curve.area.text()]
        if curve is sync:
            row += ["–", "–"]
        else:
            inside = sum(ours.mean in theirs for ours, theirs in zip(curve.bands[1:], sync.bands[1:], strict=True))
            row += [difference(curve.records, sync.records).text("+"), f"{inside} of {len(sync.marks) - 1}"]
        table.rows.append([*row, *(f"{age:.2f}" for age in curve.staleness)])
    return table


def verdicts(found: Sequence[Curve]) -> list[str]:
    """For each asynchronous setting, whether its area is in the synchronous band; for each correction, where it degrades.

    A setting degrades if its area is below the synchronous one's, and the paired interval of the difference too.
    """
    sync, lines = found[0], []
    worse: dict[str, list[int]] = {curve.correction: [] for curve in found[1:]}
    for curve in found[1:]:
        away = "inside" if curve.area.mean in sync.area else "above" if curve.area.mean > sync.area.mean else "below"
        lines.append(f"{curve.name}: area {curve.area.mean:.2f} {away} the synchronous band {sync.area.text()}")
        if difference(curve.records, sync.records).high < 0.0:
            worse[curve.correction].append(curve.eta)
    for correction, etas in worse.items():
        largest = max(curve.eta for curve in found if curve.correction == correction)
        said = f"degrades from η = {min(etas)}" if etas else f"does not degrade up to η = {largest}"
        lines.append(f"correction {correction}: {said}")
    return lines


def wall_clock_table(about: str, found: Sequence[Curve]) -> Table:
    """Seconds of training to the last mark, and the success there."""
    header = ["", "seeds", "env steps", "success", "seconds", "range", "speed-up", "staleness mean", "max"]
    table = Table(header, title=f"{about}: wall clock of training, one run at a time")
    base = {record["seed"]: record["points"][-1]["wall_s"] for record in found[0].records}
    for curve in found:
        seconds = [record["points"][-1]["wall_s"] for record in curve.records]
        shared = [record for record in curve.records if record["seed"] in base]
        ratios = [base[record["seed"]] / record["points"][-1]["wall_s"] for record in shared]
        table.rows.append(
            [
                curve.name,
                str(len(curve.records)),
                f"{curve.marks[-1]:,}",
                curve.bands[-1].text(),
                f"{statistics.median(seconds):.1f}",
                f"{min(seconds):.1f}–{max(seconds):.1f}",
                f"{statistics.median(ratios):.2f}" if ratios else "–",
                *(f"{age:.2f}" for age in curve.staleness),
            ]
        )
    return table


def draw(about: str, found: Sequence[Curve], path: Path, by: str = "env steps") -> Path:
    """Draw success against env steps, a panel per correction, or against seconds of training; bands are 95 %.

    Args:
        about: title.
        found: the curves, the synchronous one first.
        path: file to write.
        by: ``env steps`` or ``seconds``.

    Returns:
        ``path``.
    """
    from matplotlib.figure import Figure

    across: Callable[[Curve], list[float]] = _seconds if by == "seconds" else lambda curve: [float(x) for x in curve.marks]
    panels = list(dict.fromkeys(curve.correction for curve in found[1:])) or ["none"]
    figure = Figure(figsize=(1.2 + 4.4 * len(panels), 3.8), layout="constrained")
    for axes, correction in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw_curve(axes, across(found[0]), found[0], _SYNC)
        for curve in found[1:]:
            if curve.correction == correction:
                _draw_curve(axes, across(curve), curve, _COLOURS.get(curve.eta, "#7a4fa3"))
        axes.set(title=f"{about}, correction: {correction}", xlabel=by, ylim=(-0.02, 1.02))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False, fontsize=8)
    seeds = len(found[0].records)
    shown = "band: 95 % over seeds" if seeds > 2 else f"seeds: {seeds}"
    figure.axes[0].set_ylabel(f"success_once ({shown})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _seconds(curve: Curve) -> list[float]:
    columns = zip(*(record["points"] for record in curve.records), strict=True)
    return [statistics.median(point["wall_s"] for point in column) for column in columns]


def _draw_curve(axes: Axes, across: Sequence[float], curve: Curve, colour: str) -> None:
    bands = curve.bands
    label = "synchronous" if curve.eta == 0 else f"η = {curve.eta}"
    wide = 0.22 if curve.eta == 0 else 0.08
    if len(curve.records) > 2:  # the interval of two seeds would fill the panel
        axes.fill_between(across, [b.low for b in bands], [b.high for b in bands], color=colour, alpha=wide, linewidth=0)
    axes.plot(across, [b.mean for b in bands], "o-", color=colour, markersize=3, label=label, linewidth=1.4)
