"""A picture of one update: who did what, from a run's timeline."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_async.monitor.timeline import TRAINER, Slice, read_timeline
from vla_async.report.charts import COLOURS, Card, Key
from vla_async.report.formats import seconds_text

BARS = 1500  # in the picture; more would be thinner than a pixel
LANES = 24
_WAITS, _STEP = "wait", "step"  # what names of slices begin with
_OF_ROLES = {"env steps": 0, "forward": 1, "forward and backward": 2}


@dataclass(frozen=True)
class Bar:
    """A slice, or neighbours of one name that are too short to be seen apart.

    Attributes:
        lane: who.
        name: what.
        start_s: from when, in seconds from the beginning of the update.
        end_s: until when.
        depth: how many slices it lies in.
        count: how many slices it stands for.
        about: what else is known of it.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    depth: int
    count: int = 1
    about: str = ""

    @property
    def is_whole_step(self) -> bool:
        return self.lane.startswith(TRAINER) and self.name.startswith(f"{_STEP} ")


def update_card(timeline: Path, bars: int = BARS, lanes: int = LANES) -> Card | None:
    """The picture of the update of median duration; None if the timeline has recorded none.

    Args:
        timeline: a ``timeline.json``.
        bars: how many it may have; more are drawn together with their neighbours.
        lanes: how many it may have; more are left out.

    Raises:
        ValueError: if the file is no timeline.
    """
    slices = read_timeline(timeline)
    steps = sorted((it for it in slices if it.lane == f"{TRAINER} 0" and _STEP in it.args), key=lambda it: it.seconds)
    if not steps:
        return None
    step = steps[len(steps) // 2]
    seen = list(_bars(slices, step))
    names = list(dict.fromkeys(bar.lane for bar in seen))
    shown = _merged([bar for bar in seen if bar.lane in names[:lanes]], step.seconds, bars)
    about = (
        f"Update {step.args[_STEP]}, which took {seconds_text(step.seconds)}: the median of {len(steps)} recorded updates."
    )
    notes = [f"{len(names) - lanes} more lanes are not shown."] if len(names) > lanes else []
    if len(shown) < len(seen):
        notes.append("Neighbours that are too short to be seen apart are drawn as one.")
    notes.append(f"All of it is in {timeline.name}, for ui.perfetto.dev.")
    colours = _colours(shown)
    spec = _spec(shown, names[:lanes], colours) | {"seconds": step.seconds}
    return Card("One update", about, spec, _legend(colours), " ".join(notes))


def _bars(slices: Sequence[Slice], step: Slice) -> Iterator[Bar]:
    """What of the slices lies in the time of a step."""
    open_until: dict[str, list[float]] = defaultdict(list)
    for it in slices:
        start, end = max(it.start_s, step.start_s), min(it.end_s, step.end_s)
        if end <= start:
            continue
        around = open_until[it.lane]
        while around and around[-1] <= start:
            around.pop()
        about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in it.args.items())
        yield Bar(it.lane, it.name, start - step.start_s, end - step.start_s, len(around), 1, about)
        around.append(end)


def _merged(bars: list[Bar], duration_s: float, most: int) -> list[Bar]:
    """At most so many bars: those of one name that follow each other closely become one."""
    close = duration_s / most
    while len(bars) > most:
        merged: list[Bar] = []
        last: dict[tuple[str, int], int] = {}  # where the lane's last bar of that depth is
        for bar in bars:
            before = last.get((bar.lane, bar.depth))
            if before is not None and merged[before].name == bar.name and bar.start_s - merged[before].end_s < close:
                joined = merged[before]
                merged[before] = replace(joined, end_s=bar.end_s, count=joined.count + bar.count, about="")
            else:
                last[bar.lane, bar.depth] = len(merged)
                merged.append(bar)
        if close > duration_s:  # nothing is left to be joined: the longest say most
            return sorted(sorted(merged, key=lambda bar: bar.start_s - bar.end_s)[:most], key=lambda bar: bar.start_s)
        bars, close = merged, 2 * close
    return bars


def _colours(bars: Sequence[Bar]) -> dict[str, int | None]:
    """A colour for each name, by how long it took; none for waiting, which is drawn pale.

    What env workers, replicas and trainer mostly do has the colours that they have in other charts.
    """
    took: dict[str, float] = defaultdict(float)
    for bar in bars:
        if not bar.is_whole_step:
            took[bar.name] += bar.end_s - bar.start_s
    free = itertools.cycle(range(len(_OF_ROLES), COLOURS))
    colours: dict[str, int | None] = {}
    for name in sorted(took, key=lambda name: -took[name]):
        colours[name] = None if name.startswith(_WAITS) else _OF_ROLES[name] if name in _OF_ROLES else next(free)
    return colours


def _legend(colours: dict[str, int | None]) -> list[Key]:
    work = [Key(name, colour, "bar") for name, colour in colours.items() if colour is not None]
    return work + ([Key("waiting", None, "bar")] if None in colours.values() else [])


def _spec(bars: Sequence[Bar], lanes: Sequence[str], colours: dict[str, int | None]) -> dict[str, Any]:
    groups: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        groups["" if bar.is_whole_step else bar.name].append(bar)
    traces = [
        {
            "name": name,
            "colour": colours.get(name),
            "is_whole": not name,
            "lane": [bar.lane for bar in group],
            "start": [round(bar.start_s, 7) for bar in group],
            "seconds": [round(bar.end_s - bar.start_s, 7) for bar in group],
            "depth": [bar.depth for bar in group],
            "text": [_hover(bar) for bar in group],
        }
        for name, group in groups.items()
    ]
    return {"kind": "gantt", "lanes": list(lanes), "traces": sorted(traces, key=lambda trace: not trace["is_whole"])}


def _hover(bar: Bar) -> str:
    times = f", {bar.count} times" if bar.count > 1 else ""
    about = f" ({bar.about})" if bar.about else ""
    return f"{bar.name}{times}: {seconds_text(bar.end_s - bar.start_s)}{about}"
