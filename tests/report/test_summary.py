"""Key figures and the table of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.runs import evaluation, streaming_lines, update, write_run
from vla_async.report.formats import number_text, seconds_text, size_text
from vla_async.report.run_data import RunData, read_run
from vla_async.report.summary import key_figures, task_rows


def run_of(tmp_path: Path, lines: list[dict[str, float]]) -> RunData:
    return read_run(write_run(tmp_path / "1", lines))


def test_key_figures_of_a_run(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in key_figures(run_of(tmp_path, streaming_lines(30)))}
    assert (figures["Success"].value, figures["Success"].detail) == ("0.95", "95 %: 0.85 to 1.00, n = 50; first 0.10")
    assert figures["Throughput"].value == "333"  # 500 env steps in 1.5 s
    assert (figures["Trained on"].value, figures["Trained on"].detail) == ("15,000", "env steps; 30 updates, 600 episodes")
    assert figures["Training time"].value == "45.0 s"
    assert figures["Mean staleness"].detail == "updates, largest 2, bound 2"
    assert [name for name, _ in figures["Busy"].bars] == ["env workers", "replicas", "trainer"]


def test_what_a_run_has_not_logged_is_a_dash(tmp_path: Path) -> None:
    """The figures of an sft run, or of a test, must not be made up."""
    figures = {figure.name: figure for figure in key_figures(run_of(tmp_path, [{"step": 20, "lr": 0.1, "sft/nll": 2.0}]))}
    assert [name for name, figure in figures.items() if figure.is_known] == ["Trained on"]
    assert figures["Trained on"].value == "20"
    assert figures["Busy"].bars == []


def test_a_long_update_counts_for_more(tmp_path: Path) -> None:
    lines = [update(1, worker__idle_share=0.0, time__update_s=3.0), update(2, worker__idle_share=1.0, time__update_s=1.0)]
    busy = key_figures(run_of(tmp_path, lines))[-1]
    assert busy.bars == [("env workers", 0.75)]


def test_the_warm_up_does_not_count_for_who_is_busy(tmp_path: Path) -> None:
    """Else a trainer that waited for processes to start looks less busy than a finding says that it is."""
    lines = [update(number, trainer__idle_share=float(number == 1)) for number in range(1, 9)]
    assert key_figures(run_of(tmp_path, lines))[-1].bars == [("trainer", 1.0)]


def test_tasks_of_the_last_evaluation(tmp_path: Path) -> None:
    tasks = ("a/b", "lift")
    rows = task_rows(run_of(tmp_path, [evaluation(0, 0.2, tasks), evaluation(9, 0.6, tasks)]))
    assert [row.task for row in rows] == ["a/b", "lift", "all"]
    assert [row.once.text for row in rows] == ["0.55", "0.50", "0.60"]
    assert [row.first.text for row in rows] == ["0.15", "0.10", "0.20"]
    assert rows[-1].once.interval == "0.50 to 0.70"
    assert (rows[-1].episodes, rows[-1].episode_return, rows[0].episode_return) == ("50", "6", "5.5")


def test_a_single_task_has_its_name(tmp_path: Path) -> None:
    config = "env:\n  init_args:\n    task: PushCube-v1\n"
    (row,) = task_rows(read_run(write_run(tmp_path / "1", [evaluation(0, 0.2)], config)))
    assert row.task == "PushCube-v1"


def test_one_evaluation_has_none_before_it(tmp_path: Path) -> None:
    (row,) = task_rows(run_of(tmp_path, [evaluation(0, 0.2, split="test")]))
    assert (row.once.text, row.first.text) == ("0.20", "–")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds_text(0.0042), "4.2 ms"),
        (seconds_text(4.21), "4.2 s"),
        (seconds_text(187), "3:07 min"),
        (seconds_text(3780), "1:03 h"),
        (seconds_text(float("nan")), "–"),
        (number_text(40316.0), "40,316"),
        (number_text(0.6234), "0.623"),
        (number_text(float("inf")), "–"),
        (size_text(4_210_000), "4.2 MB"),
        (size_text(900), "1 kB"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected
