"""Tables and the plot: every figure that people read."""

from __future__ import annotations

import matplotlib.figure
import numpy as np
import pytest

from vla_async.collectors.episodes import Episode
from vla_async.loops import EvaluationResult
from vla_async.monitor.metrics import SuccessRate
from vla_async.monitor.report import (
    ResultRow,
    SuccessPoint,
    Table,
    duration_text,
    evaluation_line,
    evaluation_table,
    plot_success,
    results_table,
)

POINTS = [
    SuccessPoint(0, SuccessRate(2, 10), SuccessRate(1, 10)),
    SuccessPoint(1000, SuccessRate(6, 10), SuccessRate(5, 10)),
    SuccessPoint(2500, SuccessRate(19, 20), SuccessRate(18, 20)),
]


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, instead of files."""
    saved = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda figure, path, **_: (saved.append(figure), path.write_bytes(b"new"))
    )
    return saved


def test_the_plot_is_a_png(tmp_path):
    path = plot_success(POINTS, tmp_path / "deep" / "success.png", "a title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 5000
    assert [other.name for other in path.parent.iterdir()] == ["success.png"]


def test_the_plot_shows_the_rates_their_band_and_n(tmp_path, figures):
    plot_success(POINTS, tmp_path / "success.png", "a title")
    [axes] = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    once, at_end = lines["success once, n = 10 to 20"], lines["success at end, n = 10 to 20"]
    np.testing.assert_allclose(once.get_xydata(), [[0, 0.2], [1000, 0.6], [2500, 0.95]])
    np.testing.assert_allclose(at_end.get_xydata(), [[0, 0.1], [1000, 0.5], [2500, 0.9]])
    band = axes.collections[0].get_paths()[0].vertices
    for point in POINTS:
        for bound in point.success_once.interval:
            assert np.isclose(band, [point.env_steps, bound]).all(axis=1).any()
    assert (axes.get_title(), axes.get_xlabel()) == ("a title", "env steps")


def test_the_baseline_is_a_level_across_the_plot(tmp_path, figures):
    plot_success(POINTS, tmp_path / "success.png", "a title", baseline=SuccessRate(42, 100))
    [level] = [line for line in figures[0].axes[0].lines if line.get_label() == "baseline 0.42, n = 100"]
    assert set(level.get_ydata()) == {0.42}


def test_a_plot_that_fails_keeps_the_previous_one(tmp_path, monkeypatch):
    path = tmp_path / "success.png"
    path.write_bytes(b"previous")

    def fail(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        plot_success(POINTS, path, "a title")
    assert path.read_bytes() == b"previous"


def test_a_plot_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one point"):
        plot_success([], tmp_path / "success.png", "a title")


def test_the_results_table_says_before_after_and_what_it_cost():
    rows = [
        ResultRow("PushCube-v1", SuccessRate(42, 100), SuccessRate(96, 100), 150_000, 412.0),
        ResultRow("from scratch", None, SuccessRate(5, 10), 999, 4.25),
        ResultRow("other n", SuccessRate(1, 50), SuccessRate(5, 10), 1, 1.0),
    ]
    table = results_table(rows)
    named = [
        dict(zip([*table.header[:2], "low", "after", "high", *table.header[5:]], row, strict=True)) for row in table.rows
    ]
    assert named[0] == {
        "": "PushCube-v1", "baseline": "0.42", "low": "[0.33, 0.52]", "after": "0.96", "high": "[0.90, 0.98]",
        "n": "100", "lift": "+0.54", "env steps": "150,000", "wall time": "6:52",
    }  # fmt: skip
    assert (named[1]["baseline"], named[1]["lift"]) == ("–", "–")
    assert named[2]["n"] == "50, 10"


def evaluated(**tasks: tuple[int, int, int]) -> EvaluationResult:
    episodes = [
        Episode(task, seed, seed < once, seed < at_end, float(seed), 10 + seed)
        for task, (once, at_end, n) in tasks.items()
        for seed in range(n)
    ]
    return EvaluationResult("test", 7, episodes)


def test_the_evaluation_table_has_a_row_for_each_task_and_one_for_all():
    table = evaluation_table(evaluated(push=(3, 2, 4), pick=(0, 0, 4)))
    assert table.title == "test, policy version 7"
    assert table.rows == [
        ["push", "4", "0.75", "[0.30, 0.95]", "0.50", "[0.15, 0.85]", "1.50", "11.5"],
        ["pick", "4", "0.00", "[0.00, 0.49]", "0.00", "[0.00, 0.49]", "1.50", "11.5"],
        ["all", "8", "0.38", "[0.14, 0.69]", "0.25", "[0.07, 0.59]", "1.50", "11.5"],
    ]


def test_one_task_needs_no_row_for_all():
    assert [row[0] for row in evaluation_table(evaluated(push=(3, 2, 4))).rows] == ["push"]


def test_the_evaluation_line_can_be_of_one_task():
    result = evaluated(push=(3, 2, 4), pick=(0, 0, 4))
    assert evaluation_line(result).startswith("success_once 0.38 [0.14, 0.69] n=8 · success_at_end 0.25")
    assert evaluation_line(result, "push").startswith("success_once 0.75 [0.30, 0.95] n=4")


def test_markdown_aligns_columns_and_escapes_bars():
    table = Table(["task", "n"], [["a|b", "3"]])
    assert table.markdown() == "| task | n |\n| :--- | ---: |\n| a\\|b | 3 |"


def test_a_printed_table_is_never_cut_outside_of_a_terminal(capsys):
    """A log has no width; its tables must hold every figure."""
    Table(["task", "value"], [["a [bold] task " + "x" * 80, "y" * 40]], title="results").print()
    out = capsys.readouterr().out
    assert "results" in out
    assert "a [bold] task " + "x" * 80 in out
    assert "y" * 40 in out


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (60.0, "1:00"), (187.4, "3:07"), (3787.0, "1:03:07")]
)
def test_durations_are_short(seconds, text):
    assert duration_text(seconds) == text
