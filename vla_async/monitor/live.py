"""The live view of a run: what a terminal shows, made from plain data. Nothing in here knows a terminal or a trainer.

On a wide terminal the parts stand in boxes, two in a row. On a narrow or short one they are lines without boxes, of which
the least important ones are left out. What is not known is not shown: there are no empty boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vla_async.monitor import metric_table as names
from vla_async.monitor.report import duration_text, interval_text
from vla_async.monitor.sparkline import bar, sparkline

if TYPE_CHECKING:
    from vla_async.monitor.metrics import SuccessRate

BOXED_WIDTH = 79  # columns from which on parts stand in boxes: a terminal of 80 has them
_LABEL = 12  # columns of the names at the left
_LEAST_CURVE = 4  # columns; a shorter curve says nothing
_BUSY = {  # the idle share of each kind of resource, and a colour
    "env workers": (names.WORKER_IDLE, "cyan"),
    "replicas": (names.REPLICA_IDLE, "magenta"),
    "trainer": (names.TRAINER_IDLE, "green"),
}
_RATES: dict[str, str] = {
    names.ENV_STEPS_PER_S: "{:,.0f} env steps/s",
    names.DECISIONS_PER_S: "{:,.0f} decisions/s",
}
_TIMES = {names.WAIT_S: "waited", names.ROLLOUT_S: "rollout", names.TRAIN_S: "training"}
_LEARNING: dict[names.Metric | names.Family, str] = {  # of any objective
    names.APPROX_KL: "KL {:.2g}",
    names.CLIP_FRACTION: "clipped {:.0%}",
    names.ENTROPY: "entropy {:.3g}",
    names.EXPLAINED_VARIANCE: "explained variance {:.2f}",
    names.GRAD_NORM: "grad norm {:.2g}",
    names.LOG_PROB_GAP: "log-prob gap {:.2g}",
}


@dataclass(frozen=True)
class LiveState:
    """What is known of a run at one moment.

    Attributes:
        counts: how far it is, for example ``("step 3/10", "env steps 1,200")``.
        elapsed_s: seconds since it began.
        share: of the budget that is spent, in [0, 1]; None if there is no end in sight.
        remaining_s: an estimate of the seconds that are left; None if there is none.
        title: what runs.
        place: the run directory.
        metrics: the newest value of each metric, by its name.
        so_far: whether the shares and rates among them are of the update that runs, not of the one that ended last.
        validated: all validations, the newest last.
        curves: metrics over the run: ``rollout/success_once`` and the losses of imitation, ``sft/...``.
        note: what goes on beside.
        warnings: the newest ones, the newest last.
        num_warnings: how many there have been.
    """

    counts: Sequence[str]
    elapsed_s: float
    share: float | None = None
    remaining_s: float | None = None
    title: str = ""
    place: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    so_far: bool = False
    validated: Sequence[SuccessRate] = ()
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    note: str = ""
    warnings: Sequence[str] = ()
    num_warnings: int = 0

    def known(self, name: str) -> float | None:
        """A metric's value; None if it was not logged or is not finite."""
        value = self.metrics.get(name, math.nan)
        return value if math.isfinite(value) else None

    def told(self, formats: Mapping[str, str]) -> list[str]:
        """The metrics among these that are known, each in its format."""
        return [how.format(value) for name, how in formats.items() if (value := self.known(name)) is not None]


@dataclass(frozen=True)
class _Part:
    """Lines about one thing. Those of a lower rank are kept where there is no room for all."""

    title: str
    rank: int
    rows: list[Text]
    style: str = "dim"

    def box(self, lines: int) -> Panel:
        title = Text(self.title, "bold" if self.style == "dim" else f"bold {self.style}")
        return Panel(Group(*self.rows), title=title, title_align="left", border_style=self.style, height=lines + 2)


def render(state: LiveState, width: int, height: int) -> Group:
    """The view, at most ``width`` columns wide and, where that is more than a line, lower than ``height`` lines."""
    room = max(1, height - 1)  # so that a line of what was printed above stays in sight
    if width >= BOXED_WIDTH:
        head, boxes = _head(state, width), _boxes(state, width)
        if len(head) + sum(lines for lines, _ in boxes) <= room:
            return Group(*(row for _, row in head), *(box for _, box in boxes))
    parts = [part for build in (*_PARTS, _warnings) if (part := build(state, width)).rows]
    rows = [*_head(state, width), *((part.rank, row) for part in parts for row in part.rows)]
    kept = sorted(sorted(range(len(rows)), key=lambda number: rows[number][0])[:room])
    return Group(*(rows[number][1] for number in kept))


def _boxes(state: LiveState, width: int) -> list[tuple[int, Table | Panel]]:
    """Boxes with their heights: two in a row, and what is left over, like the warnings, as wide as the view."""
    half, boxes = width // 2, list[tuple[int, Table | Panel]]()
    narrow = [(build, part) for build in _PARTS if (part := build(state, half - 4)).rows]
    for (_, left), (_, right) in zip(narrow[::2], narrow[1::2], strict=False):
        row, lines = Table.grid(), max(len(left.rows), len(right.rows))
        row.add_column(width=half)
        row.add_column(width=width - half)
        row.add_row(left.box(lines), right.box(lines))
        boxes.append((lines + 2, row))
    for build in [build for build, _ in narrow[len(narrow) // 2 * 2 :]] + [_warnings]:
        if (part := build(state, width - 4)).rows:
            boxes.append((len(part.rows) + 2, part.box(len(part.rows))))
    return boxes


def _line(*pieces: str | tuple[str, str] | Text) -> Text:
    return Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")


def _label(name: str, width: int = _LABEL) -> tuple[str, str]:
    return f"{name:<{width}}", "dim"


def _items(name: str, items: Sequence[str], width: int) -> list[Text]:
    """Items after a name, in as many lines as they need."""
    lines = _wrapped(items, width - _LABEL)
    return [_line(_label("" if number else name), line) for number, line in enumerate(lines)]


def _wrapped(items: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def _head(state: LiveState, width: int) -> list[tuple[int, Text]]:
    """What runs, how far it is, and the bar; each with its rank."""
    rows: list[tuple[int, Text]] = []
    if state.title:
        title, room = _line((state.title, "bold")), width - len(state.title) - 3
        place = state.place if len(state.place) <= room else f"…{state.place[len(state.place) - room + 1 :]}"
        if room > 20:
            title.append(f"{place:>{room + 3}}", "dim")
        rows.append((2, title))
    items = [*state.counts, f"elapsed {duration_text(state.elapsed_s)}"]
    items += [f"about {duration_text(state.remaining_s)} left"] if state.remaining_s else []
    rows += [(0, _line(line)) for line in _wrapped(items, width)]
    if state.share is not None:
        rows.append((1, _line(bar(state.share, width - 6, "blue"), f"{_floor_percent(state.share):>4} %")))
    return rows


def _floor_percent(share: float) -> int:
    return math.floor(100.0 * share + 1e-9)  # 100 % is what is done


def _success(state: LiveState, width: int) -> _Part:
    """Success, or the losses of imitation, as curves; and what goes on beside."""
    curves: list[tuple[str, Sequence[float], str, tuple[float, float], str]] = []
    if state.validated:
        newest = state.validated[-1]
        text = str(newest) if width >= 50 else f"{newest.rate:.2f} {interval_text(newest)}"
        curves.append(("validated", [rate.rate for rate in state.validated], text, (0.0, 1.0), "bold green"))
    for name, values in state.curves.items():
        newest_value, finite = state.metrics.get(name, math.nan), [value for value in values if math.isfinite(value)]
        if name.startswith("sft/"):
            around = (min(finite, default=0.0), max(finite, default=0.0))
            curves.append((_words(name), values, f"{newest_value:.4g}", around, "blue"))
        else:
            curves.append(("training", values, f"{newest_value:.2f}", (0.0, 1.0), "cyan"))
    column = max([_LABEL, *(len(label) + 1 for label, *_ in curves)])
    room = width - column - 2 - max((len(text) for _, _, text, _, _ in curves), default=0)
    rows = []
    for label, values, text, (low, high), style in curves:
        drawn = f"{sparkline(values, room, low, high):<{room}}  " if room >= _LEAST_CURVE else ""
        rows.append(_line(_label(label, column), (drawn, style), text))
    if state.note:
        rows.append(_line((state.note, "italic")))
    losses = any(name.startswith("sft/") for name in state.curves)
    return _Part("loss" if losses else "success", 3, rows)


def _words(name: str) -> str:
    return name.rpartition("/")[2].replace("_", " ")


def _busy(state: LiveState, width: int) -> _Part:
    """How much of the time each kind of resource was busy."""
    rows = []
    for name, (metric, style) in _BUSY.items():
        if (idle := state.known(metric)) is not None:
            rows.append(_line(_label(name), bar(1.0 - idle, width - _LABEL - 10, style), f" {1.0 - idle:>4.0%} busy"))
    return _Part("this update so far" if state.so_far else "last update", 4, rows)


def _data(state: LiveState, width: int) -> _Part:
    """What is under way between the envs and the trainer, and how old it is."""
    bound, shares = int(state.known(names.STALENESS_BOUND) or 0), ""
    ages = state.told({names.STALENESS_MEAN: "mean {:.2f}", names.STALENESS_MAX: f"max {{:.0f}} of {bound}"})
    if ages and bound:
        shares = sparkline([state.known(names.STALENESS_SHARE.of(age)) or 0.0 for age in range(bound + 1)], 16)
        ages.append(f"ages 0 {shares} {bound}")
    rows = _items("staleness", ages, width)
    for row in rows if shares else []:
        row.highlight_words([shares], "yellow")
    if (occupied := state.known(names.OCCUPIED)) is not None:
        slots = state.known(names.SLOTS)
        taken = f" {occupied:>4.0%} taken" if slots is None else f" {occupied * slots:.0f} of {slots:.0f} taken"
        rows.append(_line(_label("slots"), bar(occupied, width - _LABEL - len(taken), "yellow"), taken))
    dropped = sum(value for name, value in state.metrics.items() if names.DROPPED.labels_of(name) is not None)
    trouble = {"dropped": dropped, "cut": state.known(names.CUT), "restarts": state.known(names.WORKER_RESTARTS)}
    queue = [*state.told({names.WAITING: "{:,.0f} waiting"}), *(f"{n:,.0f} {name}" for name, n in trouble.items() if n)]
    if (without := state.known(names.WORKER_NO_SLOT) or 0.0) >= 0.005:
        queue.append(f"envs without slot {without:.0%}")
    return _Part("data", 5, [*rows, *_items("queue", queue, width)])


def _speed(state: LiveState, width: int) -> _Part:
    """Rates and times of an update, and what the optimizer says."""
    times = {names.UPDATE_S: "so far" if state.so_far else "took"} | _TIMES
    spent = {words: value for name, words in times.items() if (value := state.known(name)) is not None}
    learning = {name: how for end, how in _LEARNING.items() for name in state.metrics if name.endswith(_end_of(end))}
    rows = _items("throughput", state.told(_RATES), width)
    rows += _items("update", [f"{words} {_short(value)}" for words, value in spent.items()], width)
    return _Part("speed and learning", 6, [*rows, *_items("learning", state.told(learning), width)])


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else duration_text(seconds)


def _end_of(metric: names.Metric | names.Family) -> str:
    return metric if isinstance(metric, str) else metric.pattern.removeprefix("<objective>")


def _warnings(state: LiveState, width: int) -> _Part:
    rows = [_line(("! ", "bold yellow"), text) for text in state.warnings]
    number = f"{state.num_warnings:,} warnings" if state.num_warnings != 1 else "a warning"
    return _Part(number, 3, rows, "yellow")


_PARTS: tuple[Callable[[LiveState, int], _Part], ...] = (_success, _busy, _data, _speed)
