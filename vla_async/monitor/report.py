"""What people look at: tables of success rates, and the plot of a learning curve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vla_async.monitor.metrics import SuccessRate, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table as RichTable

    from vla_async.loops.evaluate import EvaluationResult

_ONCE, _AT_END, _BASELINE = "#1f6fb2", "#d9822b", "#6b7280"


@dataclass(frozen=True)
class SuccessPoint:
    """One evaluation on a learning curve.

    Attributes:
        env_steps: env steps trained on before it.
        success_once: success at any env step of an episode.
        success_at_end: success after the last env step of an episode.
    """

    env_steps: int
    success_once: SuccessRate
    success_at_end: SuccessRate


@dataclass(frozen=True)
class ResultRow:
    """What reinforcement learning did to one policy.

    Attributes:
        name: what was trained, for example a task or a seed.
        baseline: success before; None if it was not measured.
        after: success afterwards, on the same episodes.
        env_steps: env steps trained on.
        wall_s: seconds of wall clock that the training took.
    """

    name: str
    baseline: SuccessRate | None
    after: SuccessRate
    env_steps: int
    wall_s: float


@dataclass
class Table:
    """A small table of text; the first column is aligned left, the others right."""

    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    title: str | None = None

    def rich(self) -> RichTable:
        """The table for a terminal: ``rich.print(table.rich())``."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, title_justify="left")
        for column, name in enumerate(self.header):
            # a table that is cut off is worse than one that wraps
            table.add_column(Text(name), justify="right" if column else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def print(self) -> None:
        """Print it on standard output; where that is no terminal, as wide as it is."""
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(self.rich())

    def markdown(self) -> str:
        """The table for a README."""
        rule = [":---", *["---:"] * (len(self.header) - 1)]
        escaped = ([cell.replace("|", "\\|") for cell in row] for row in (self.header, rule, *self.rows))
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def results_table(rows: Sequence[ResultRow], title: str | None = None) -> Table:
    """Before and after: success_once with its 95 % interval, and what the difference cost."""
    header = ["", "baseline", "95 %", "after RL", "95 %", "n", "lift", "env steps", "wall time"]
    table = Table(header, title=title)
    for row in rows:
        before = ("–", "–") if row.baseline is None else (f"{row.baseline.rate:.2f}", interval_text(row.baseline))
        lift = "–" if row.baseline is None else f"{row.after.rate - row.baseline.rate:+.2f}"
        n = str(row.after.n) if row.baseline is None or row.baseline.n == row.after.n else f"{row.baseline.n}, {row.after.n}"
        after = f"{row.after.rate:.2f}", interval_text(row.after)
        table.rows.append([row.name, *before, *after, n, lift, f"{row.env_steps:,}", duration_text(row.wall_s)])
    return table


def evaluation_table(result: EvaluationResult) -> Table:
    """Both success rates of an evaluation, with n and 95 % interval: of each task, and of all if there are several."""
    header = ["task", "n", "success_once", "95 %", "success_at_end", "95 %", "return", "env steps"]
    table = Table(header, title=f"{result.split}, policy version {result.policy_version}")
    for task in [*result.tasks, *([None] if len(result.tasks) > 1 else [])]:
        episodes = [episode for episode in result.episodes if task in (None, episode.task)]
        rates = [result.success(kind, task) for kind in _KINDS]
        cells = [cell for rate in rates for cell in (f"{rate.rate:.2f}", interval_text(rate))]
        means = mean(episode.episode_return for episode in episodes), mean(episode.env_steps for episode in episodes)
        table.rows.append([task or "all", str(len(episodes)), *cells, f"{means[0]:.2f}", f"{means[1]:.1f}"])
    return table


def evaluation_line(result: EvaluationResult, task: str | None = None) -> str:
    """Both success rates in one line, for example ``success_once 0.62 [0.48, 0.74] n=50 · success_at_end ...``."""
    return " · ".join(f"{kind} {result.success(kind, task)}" for kind in _KINDS)


def plot_success(points: Sequence[SuccessPoint], path: Path, title: str, baseline: SuccessRate | None = None) -> Path:
    """Draw success against env steps, with 95 % bands; an existing picture is replaced only by a complete one.

    Args:
        points: the evaluations, in the order of their env steps.
        path: file to write; its ending chooses the format.
        title: title of the plot.
        baseline: a success rate to compare with, drawn as a level.

    Returns:
        ``path``.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not points:
        raise ValueError("plot_success needs at least one point")
    from matplotlib.figure import Figure

    # a Figure of its own, not pyplot: no global state, no display, and the default canvas is Agg
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    if baseline is not None:
        low, high = baseline.interval
        axes.axhspan(low, high, color=_BASELINE, alpha=0.12, linewidth=0)
        axes.axhline(baseline.rate, color=_BASELINE, linestyle="--", label=f"baseline {baseline.rate:.2f}, n = {baseline.n}")
    steps = [point.env_steps for point in points]
    _curve(axes, steps, [point.success_once for point in points], "success once", _ONCE, "o-")
    # dashed and on top, so that both are seen where they agree
    _curve(axes, steps, [point.success_at_end for point in points], "success at end", _AT_END, "s--")
    axes.set(title=title, xlabel="env steps", ylabel="success rate (band: 95 %)", ylim=(-0.02, 1.02))
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    unfinished = path.with_name(f".unfinished-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(unfinished, dpi=150)
    os.replace(unfinished, path)
    return path


def interval_text(rate: SuccessRate) -> str:
    """The 95 % interval, for example ``[0.48, 0.74]``."""
    low, high = rate.interval
    return f"[{low:.2f}, {high:.2f}]"


def duration_text(seconds: float) -> str:
    """For example ``4.2 s``, ``3:07`` (minutes) or ``1:03:07`` (hours)."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_KINDS: tuple[Literal["success_once"], Literal["success_at_end"]] = ("success_once", "success_at_end")


def _curve(axes: Axes, steps: list[int], rates: list[SuccessRate], name: str, colour: str, style: str) -> None:
    numbers = sorted({rate.n for rate in rates})
    n = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    lows, highs = zip(*(rate.interval for rate in rates), strict=True)
    axes.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0)
    axes.plot(steps, [rate.rate for rate in rates], style, color=colour, markersize=4, label=f"{name}, n = {n}")
