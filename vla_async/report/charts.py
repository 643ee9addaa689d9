"""Cards with charts: the chart table applied to runs, as plain values that the page's script draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_async.monitor.metric import Family, Metric
from vla_async.report.chart_kinds import HeatMap, Lines, Section, Series
from vla_async.report.columns import Columns, SampledRun, Source, Values

COLOURS = 8  # of the palette
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")  # Plotly's names


@dataclass(frozen=True)
class Key:
    """An entry of a legend; ``colour`` is a place in the palette, None for the colour of text."""

    label: str
    colour: int | None
    dash: str = "solid"


@dataclass(frozen=True)
class Card:
    """A chart with what stands around it.

    Attributes:
        title: of the chart.
        about: how to read it.
        spec: what the script draws.
        legend: the meaning of its lines, where there are several.
        note: what is missing in it, or was left out.
        ramp: whether a scale from 0 to 100 % belongs to it.
    """

    title: str
    about: str
    spec: dict[str, Any]
    legend: list[Key] = field(default_factory=list)
    note: str = ""
    ramp: bool = False


@dataclass
class ChartData:
    """The columns that charts use, each once."""

    runs: Sequence[SampledRun]
    columns: dict[tuple[int, Source, str], Values] = field(default_factory=dict)

    def add(self, run: int, source: Source, name: str, complement: bool = False) -> str:
        """The key by which the script finds a column."""
        key = f"1 - {name}" if complement else name
        if (run, source, key) not in self.columns:
            self.columns[run, source, key] = self.runs[run].source(source).values(name, complement)
        return key

    def plain(self) -> list[dict[str, Any]]:
        """The runs for the script."""
        sources: tuple[Source, ...] = ("updates", "evaluations")
        return [
            {"label": run.label}
            | {
                source: {
                    "x": run.source(source).x(),
                    "columns": {key: values for (i, of, key), values in self.columns.items() if (i, of) == (index, source)},
                }
                for source in sources
            }
            for index, run in enumerate(self.runs)
        ]


@dataclass(frozen=True)
class _Line:
    run: int
    series: Series
    name: str
    label: str
    band: tuple[str, ...]


def cards(section: Section, data: ChartData) -> tuple[list[Card], list[str]]:
    """The cards of a section, and the titles of the charts for which no run has logged anything."""
    made, missing = [], []
    for chart in section.charts:
        found = list(_line_cards(chart, data) if isinstance(chart, Lines) else _heat_cards(chart, data))
        made += found
        if not found:
            missing.append(chart.title)
    return made, missing


# ---------------------------------------------------------------------- lines


def _line_cards(chart: Lines, data: ChartData) -> Iterator[Card]:
    several = len(data.runs) > 1
    groups = [[series] for series in chart.series] if several and not chart.together else [list(chart.series)]
    for group in groups:
        lines = [line for run in range(len(data.runs)) for series in group for line in _found(data, run, series, chart.x)]
        if not lines:
            continue
        labels = list(dict.fromkeys(line.label for line in lines))
        plain, legend = [], {}
        for line in lines:
            place = labels.index(line.label)
            colour, dash = (line.run, DASHES[place % len(DASHES)]) if several else (place, "solid")
            plain.append(_plain_line(line, data, colour, dash))
            legend[line.label] = Key(line.label, None if several else colour, dash)
        spec: dict[str, Any] = {"kind": "lines", "series": plain, "unit": chart.unit, "x": chart.x and str(chart.x)}
        spec |= {"stacked": chart.stacked and not several, "smooth": chart.smooth, "whole": chart.whole}
        is_split = len(groups) > 1
        title = f"{chart.title}: {labels[0]}" if is_split and len(labels) == 1 else chart.title
        about = group[0].entry.about if is_split and not group[0].complement else chart.about
        absent = [run.label for index, run in enumerate(data.runs) if all(line.run != index for line in lines)]
        note = f"Not logged by {', '.join(absent)}." if absent else ""
        yield Card(title, about, spec, list(legend.values()) if len(legend) > 1 else [], note)


def _found(data: ChartData, run: int, series: Series, x: Metric | None) -> Iterator[_Line]:
    """The lines of a series that a run has logged, of all its tasks together."""
    columns = data.runs[run].source(series.source)
    if x is not None and x not in columns.names:
        return
    for name, labels in _names(columns, series.entry).items():
        parts = (labels["split"],) if "split" in labels else ()
        band = tuple(str(bound.of(*parts)) for bound in series.band or ())
        reason = labels.get("reason")
        if reason and not any(columns.values(name)):
            continue  # nothing was dropped for it
        label = f"{series.label}: {reason}" if reason else series.label
        yield _Line(run, series, name, label, band if set(band) <= set(columns.names) else ())


def _names(columns: Columns, entry: Metric | Family) -> dict[str, dict[str, str]]:
    """The names of an entry, but those of single tasks; of several objectives or splits the first."""
    found = {name: labels for name, labels in columns.matching(entry).items() if not labels.get("task")}
    return found if any("reason" in labels for labels in found.values()) else dict(list(found.items())[:1])


def _plain_line(line: _Line, data: ChartData, colour: int, dash: str) -> dict[str, Any]:
    source = line.series.source
    plain: dict[str, Any] = {"run": line.run, "source": source, "label": line.label, "colour": colour, "dash": dash}
    plain["y"] = data.add(line.run, source, line.name, line.series.complement)
    plain["band"] = [data.add(line.run, source, bound) for bound in line.band]
    return plain


# ---------------------------------------------------------------------- heat maps


def _heat_cards(chart: HeatMap, data: ChartData) -> Iterator[Card]:
    for index, run in enumerate(data.runs):
        matching = run.source(chart.source).matching(chart.rows)
        names = {labels[chart.free]: name for name, labels in matching.items() if labels[chart.free]}
        if not names:
            continue
        overlay, legend = [], []
        for place, series in enumerate(chart.overlay):
            for line in _found(data, index, series, None):
                overlay.append(_plain_line(line, data, 0, DASHES[place]))
                legend.append(Key(line.label, None, DASHES[place]))
        spec: dict[str, Any] = {"kind": "heat", "run": index, "source": chart.source, "overlay": overlay}
        spec |= {"unit": chart.free, "gaps": None if chart.free == "task" else 0}
        spec["rows"] = [
            {"label": label, "at": at, "z": data.add(index, chart.source, names[label]) if label in names else None}
            for label, at in _places(chart, names)
        ]
        title = f"{chart.title}: {run.label}" if len(data.runs) > 1 else chart.title
        yield Card(title, chart.about, spec, legend, ramp=True)


def _places(chart: HeatMap, labels: Iterable[str]) -> list[tuple[str, int]]:
    """The rows of a map and where they lie, with those between them that were never logged."""
    if chart.free == "task":
        return [(label, place) for place, label in enumerate(sorted(labels))]
    largest = max(map(int, labels))
    if chart.doubling:
        return [(str(2**place), place) for place in range(largest.bit_length())]
    return [(str(place), place) for place in range(largest + 1)]
