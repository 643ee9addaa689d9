"""The picture of one update: the typical one, cut to its time, with no more bars than can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.runs import step_events, update, write_run
from vla_async.report.gantt import Bar, _merged, update_card


def timeline(tmp_path: Path, durations: list[float], workers: int = 2) -> Path:
    return write_run(tmp_path / "1", [update(1)], timeline=step_events(durations, workers)) / "timeline.json"


def test_the_update_of_median_duration_is_shown(tmp_path: Path) -> None:
    """The first one starts processes, and the longest validates: neither says how the run works."""
    card = update_card(timeline(tmp_path, [9.0, 1.0, 1.2, 0.9, 4.0]))
    assert card is not None
    assert card.about.startswith("Update 3, which took 1.2 s")
    starts = [start for trace in card.spec["traces"] for start in trace["start"]]
    ends = [a + b for trace in card.spec["traces"] for a, b in zip(trace["start"], trace["seconds"], strict=True)]
    assert min(starts) == 0
    assert max(ends) == pytest.approx(1.2, abs=1e-5)


def test_lanes_and_names_are_told_apart(tmp_path: Path) -> None:
    card = update_card(timeline(tmp_path, [1.0]))
    assert card is not None
    assert card.spec["lanes"] == ["trainer rank 0", "replica 0", "env worker 0", "env worker 1"]
    colours = {key.label: key.colour for key in card.legend}
    assert colours == {"env steps": 0, "forward": 1, "forward and backward": 2, "optimizer step": 3, "waiting": None}
    whole, *others = card.spec["traces"]
    assert whole["is_whole"]
    assert whole["depth"] == [0]
    assert {depth for trace in others if trace["lane"][0] == "trainer rank 0" for depth in trace["depth"]} == {1}
    (forward,) = [trace for trace in others if trace["name"] == "forward"]
    assert forward["text"][0] == "forward: 20 ms (rows 2, version 1)"


def test_bars_that_are_too_short_become_one(tmp_path: Path) -> None:
    card = update_card(timeline(tmp_path, [1.0], workers=4), bars=30)
    assert card is not None
    assert sum(len(trace["lane"]) for trace in card.spec["traces"]) <= 30
    assert "drawn as one" in card.note


def test_a_bound_is_kept_even_where_nothing_can_be_joined() -> None:
    """Names that alternate cannot be joined; then the longest are kept."""
    bars = [Bar("a", "xy"[place % 2], place, place + 0.5 + 0.01 * (place == 7), 0) for place in range(40)]
    kept = _merged(bars, 40.0, 10)
    assert len(kept) == 10
    assert bars[7] in kept


def test_lanes_that_are_left_out_are_told(tmp_path: Path) -> None:
    card = update_card(timeline(tmp_path, [1.0], workers=6), lanes=4)
    assert card is not None
    assert card.spec["lanes"] == ["trainer rank 0", "replica 0", "env worker 0", "env worker 1"]
    assert "4 more lanes are not shown" in card.note


def test_a_timeline_without_steps_has_no_picture(tmp_path: Path) -> None:
    assert update_card(timeline(tmp_path, [])) is None
