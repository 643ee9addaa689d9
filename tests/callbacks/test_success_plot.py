"""``SuccessPlot``: what it draws, and when."""

from __future__ import annotations

import warnings

import pytest

from vla_async.callbacks import SuccessPlot
from vla_async.callbacks import success_plot as module
from vla_async.monitor.metrics import SuccessRate
from vla_async.monitor.report import SuccessPoint


@pytest.fixture
def drawn(monkeypatch):
    """Every call of the function that draws, with a copy of its points."""
    calls = []
    monkeypatch.setattr(module, "plot_success", lambda points, path, title: calls.append((list(points), path, title)))
    return calls


def test_each_validation_adds_a_point_at_its_env_steps_and_draws_anew(make_trainer, evaluation, drawn):
    plot, trainer = SuccessPlot(), make_trainer()
    plot.on_start(trainer)
    for env_steps, successes in ((0, 1), (500, 4)):
        result = evaluation((successes, 1, 5))
        result.env_steps = env_steps
        plot.on_evaluation_end(trainer, result)
    first = SuccessPoint(0, SuccessRate(1, 5), SuccessRate(1, 5))
    second = SuccessPoint(500, SuccessRate(4, 5), SuccessRate(1, 5))
    path = trainer.path / "success.png"
    assert drawn == [([first], path, "fake"), ([first, second], path, "fake")]


def test_a_second_run_begins_with_no_points(make_trainer, evaluation, drawn):
    plot, trainer = SuccessPlot(), make_trainer()
    for _ in range(2):
        plot.on_start(trainer)
        plot.on_evaluation_end(trainer, evaluation((1, 1, 5)))
        plot.on_end(trainer)
    assert [len(points) for points, *_ in drawn] == [1, 1]


def test_an_evaluation_on_its_own_draws_nothing(make_trainer, evaluation, drawn):
    SuccessPlot().on_evaluation_end(make_trainer(stage="test"), evaluation((1, 1, 5)))
    assert drawn == []


def test_the_picture_stands_in_the_run_directory(make_trainer, evaluation):
    plot, trainer = SuccessPlot("curve.svg"), make_trainer()
    plot.on_start(trainer)
    plot.on_evaluation_end(trainer, evaluation((1, 1, 5)))
    assert "<svg" in (trainer.path / "curve.svg").read_text()


def test_a_disk_that_refuses_the_picture_is_warned_of_once_and_stops_nothing(make_trainer, evaluation):
    """Hours of training must not end for a picture."""
    plot, trainer = SuccessPlot(), make_trainer()
    (trainer.path / ".unfinished-success.png").mkdir()  # nothing can be written in its place
    plot.on_start(trainer)
    with pytest.warns(UserWarning, match=r"success.png could not be drawn.* without: Is a directory"):
        plot.on_evaluation_end(trainer, evaluation((1, 1, 5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.on_evaluation_end(trainer, evaluation((2, 1, 5)))
    (trainer.path / ".unfinished-success.png").rmdir()
    plot.on_evaluation_end(trainer, evaluation((3, 1, 5)))
    assert (trainer.path / "success.png").is_file()


@pytest.mark.parametrize("filename", ["success", "success.bmp", "../success.png"])
def test_a_file_name_that_cannot_be_drawn_to_is_refused(filename):
    with pytest.raises(ValueError, match=r"success_plot\.filename=.* must be a plain file name"):
        SuccessPlot(filename)
