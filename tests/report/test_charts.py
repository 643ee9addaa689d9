"""The chart table applied to runs: what is drawn, in which colour, and what is said of what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.report.runs import evaluation, streaming_lines, update, write_run
from vla_async.monitor.metric import Metric
from vla_async.report import chart_table
from vla_async.report.chart_kinds import HeatMap, Lines, Section
from vla_async.report.charts import Card, ChartData, cards
from vla_async.report.columns import sampled
from vla_async.report.run_data import read_run


def drawn(
    tmp_path: Path, section: Section, *runs: Sequence[Mapping[str, object]]
) -> tuple[dict[str, Card], list[str], ChartData]:
    """The cards of a section by title, the titles of what is missing, and the columns."""
    paths = [write_run(tmp_path / name / "1", lines) for name, lines in zip("abcdefgh", runs, strict=False)]
    data = ChartData(sampled([read_run(path) for path in paths]))
    made, missing = cards(section, data)
    return {card.title: card for card in made}, missing, data


@pytest.mark.parametrize("section", chart_table.SECTIONS, ids=lambda section: section.anchor)
def test_a_run_that_logs_everything_has_every_chart_but_those_of_other_runs(tmp_path: Path, section: Section) -> None:
    """A metric that is renamed would silently take its chart away."""
    _, missing, _ = drawn(tmp_path, section, streaming_lines(4, tasks=("lift", "push")))
    assert set(missing) <= {"Imitation error", "KL from the start", "Groups"}


def test_one_run_has_a_colour_for_each_line(tmp_path: Path) -> None:
    made, _, data = drawn(tmp_path, chart_table.SPEED, streaming_lines(4))
    card = made["Who is busy"]
    assert [(key.label, key.colour) for key in card.legend] == [("env workers", 0), ("replicas", 1), ("trainer", 2)]
    keys = [series["y"] for series in card.spec["series"]]
    assert keys == ["1 - worker/idle_share", "1 - replica/idle_share", "1 - trainer/idle_share"]
    idle = data.runs[0].updates.values("worker/idle_share")
    busy = data.columns[0, "updates", keys[0]]
    assert [a + b for a, b in zip(busy, idle, strict=True) if a is not None and b is not None] == pytest.approx([1.0] * 4)


def test_several_runs_have_one_colour_each_and_lines_of_one_chart_get_charts_of_their_own(tmp_path: Path) -> None:
    made, _, _ = drawn(tmp_path, chart_table.SPEED, streaming_lines(4), streaming_lines(4, pace=2))
    for title in ("Who is busy: env workers", "Who is busy: replicas", "Who is busy: trainer", "Throughput"):
        assert [(series["run"], series["colour"]) for series in made[title].spec["series"]] == [(0, 0), (1, 1)]
        assert made[title].legend == []  # the runs' colours stand at the top of the page
    assert made["Time of an update: waiting"].about == chart_table.m.WAIT_S.about


def test_success_of_several_runs_is_told_apart_by_colour_and_kind_of_line(tmp_path: Path) -> None:
    made, _, _ = drawn(tmp_path, chart_table.LEARNING, streaming_lines(20), streaming_lines(20, pace=2))
    card = made["Success by env steps"]
    assert [(series["colour"], series["dash"]) for series in card.spec["series"]] == [
        (0, "solid"),
        (0, "dot"),
        (1, "solid"),
        (1, "dot"),
    ]
    assert [(key.label, key.colour, key.dash) for key in card.legend] == [
        ("held-out episodes", None, "solid"),
        ("while training", None, "dot"),
    ]
    assert card.spec["series"][0]["band"] == ["validate/success_once_low", "validate/success_once_high"]


def test_a_run_that_lacks_a_metric_is_named(tmp_path: Path) -> None:
    made, missing, _ = drawn(tmp_path, chart_table.STALENESS, streaming_lines(4), [update(1, staleness__max=0)])
    assert made["Mean, largest and bound"].note == ""
    assert made["Staleness over the run: a"].spec["run"] == 0
    assert missing == []
    made, missing, _ = drawn(tmp_path / "other", chart_table.MEMORY, [update(1)])
    assert (made, missing) == ({}, ["Memory by role"])
    made, _, _ = drawn(tmp_path / "third", chart_table.MEMORY, streaming_lines(2), [update(1)])
    assert made["Memory by role: slab"].note == "Not logged by b."


def test_a_success_chart_needs_its_axis(tmp_path: Path) -> None:
    """The evaluation of `vla-async test` knows neither env steps nor time; its success stands in the table of tasks."""
    line = {
        name: value for name, value in evaluation(3, 0.5, split="test").items() if name not in ("env_steps", "elapsed_s")
    }
    made, missing, _ = drawn(tmp_path, chart_table.LEARNING, [line])
    assert "Success by env steps" in missing
    assert made["Success at the end"].spec["series"][0]["y"] == "test/success_at_end"


def test_every_reason_for_dropping_has_a_line(tmp_path: Path) -> None:
    lines = [update(1, queue__dropped__stale=1) | {"queue/dropped/<b>": 2}]
    made, _, _ = drawn(tmp_path, chart_table.BATCHES, lines)
    labels = [series["label"] for series in made["Trajectories since the start"].spec["series"]]
    assert labels == ["dropped: <b>", "dropped: stale"]


def test_rows_of_a_map_are_in_the_order_of_their_numbers_without_a_gap(tmp_path: Path) -> None:
    """A size that never occurred would else be drawn in the colour of its neighbours."""
    lines = [update(1) | {f"batch_size/share_{rows}": 0.2 for rows in (1, 2, 8, 16)} | {"batch_size/mean": 4.0}]
    made, _, _ = drawn(tmp_path, chart_table.BATCHES, lines)
    spec = made["Batch sizes over the run"].spec
    assert [(row["label"], row["at"]) for row in spec["rows"]] == [("1", 0), ("2", 1), ("4", 2), ("8", 3), ("16", 4)]
    assert [row["z"] for row in spec["rows"][1:3]] == ["batch_size/share_2", None]
    assert [series["label"] for series in spec["overlay"]] == ["mean"]


def test_ages_begin_with_fresh_data(tmp_path: Path) -> None:
    made, _, _ = drawn(tmp_path, chart_table.STALENESS, [update(1, staleness__share_2=1.0)])
    rows = made["Staleness over the run"].spec["rows"]
    assert [(row["label"], row["z"]) for row in rows] == [("0", None), ("1", None), ("2", "staleness/share_2")]


def test_tasks_have_rows_and_no_zeros_where_they_were_not_evaluated(tmp_path: Path) -> None:
    made, _, _ = drawn(tmp_path, chart_table.LEARNING, [evaluation(0, 0.2, ("lift", "push"))])
    spec = made["Success by task"].spec
    assert [row["z"] for row in spec["rows"]] == ["validate/success_once/lift", "validate/success_once/push"]
    assert spec["gaps"] is None


def test_every_metric_of_a_chart_is_in_the_metric_table() -> None:
    """A chart of a name that nobody logs would never be drawn."""
    entries = {str(entry) for area in chart_table.m.TABLE.values() for entry in area}
    for section in chart_table.SECTIONS:
        for chart in section.charts:
            series = chart.overlay if isinstance(chart, HeatMap) else chart.series
            rows = [chart.rows] if isinstance(chart, HeatMap) else []
            assert {str(one.entry) for one in series} | {str(row) for row in rows} <= entries
            if isinstance(chart, Lines):
                assert chart.x is None or isinstance(chart.x, Metric)
