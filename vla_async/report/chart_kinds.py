"""What a chart of the report is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_async.monitor.metric import Family, Metric
from vla_async.report.columns import Source

Unit = Literal["share", "seconds", "number", "rate", "mib", "updates"]


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        entry: the metric; of a family all that were logged, but for those of single tasks.
        label: what the line is called.
        source: whether updates or evaluations log it.
        band: the metrics of its lower and upper bound.
        complement: whether 1 minus the metric is drawn.
    """

    entry: Metric | Family
    label: str
    source: Source = "updates"
    band: tuple[Family, Family] | None = None
    complement: bool = False


@dataclass(frozen=True, init=False)
class Lines:
    """A chart of lines.

    Attributes:
        title: of the chart.
        about: a sentence on how to read it.
        series: its lines.
        unit: of the vertical axis.
        x: what it is drawn against; None for what the reader chooses.
        together: whether the lines stay in one chart where several runs are compared; else each gets a chart of its own.
        stacked: whether the lines add up, so that areas are drawn.
        smooth: whether a running mean is drawn over what the updates log.
        whole: whether the vertical axis shows all of 0 to 1.
    """

    title: str
    about: str
    series: tuple[Series, ...]
    unit: Unit
    x: Metric | None
    together: bool
    stacked: bool
    smooth: bool
    whole: bool

    def __init__(
        self,
        title: str,
        about: str,
        *series: Series,
        unit: Unit = "number",
        x: Metric | None = None,
        together: bool = False,
        stacked: bool = False,
        smooth: bool = False,
        whole: bool = False,
    ) -> None:
        values = (title, about, series, unit, x, together, stacked, smooth, whole)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class HeatMap:
    """A map of shares over the run, a row for each member of a family; one map for each run.

    Attributes:
        title: of the chart.
        about: a sentence on how to read it.
        rows: the family.
        free: the free part that tells its members apart.
        overlay: lines over the map.
        source: whether updates or evaluations log it.
        doubling: whether the rows are sizes that double, so that lines are placed by their logarithm.
    """

    title: str
    about: str
    rows: Family
    free: Literal["age", "rows", "task"]
    overlay: tuple[Series, ...] = ()
    source: Source = "updates"
    doubling: bool = False


@dataclass(frozen=True)
class Section:
    """Charts on one subject; ``anchor`` is its place in the page's address."""

    anchor: str
    title: str
    about: str
    charts: tuple[Lines | HeatMap, ...]
