"""``Progress``: what it tells, on a terminal and elsewhere, and that its thread ends."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.fakes import wait_until
from vla_async.callbacks import Progress
from vla_async.callbacks.progress import done


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "progress"]


def test_a_heartbeat_comes_while_the_main_thread_is_busy(make_trainer, capsys):
    """A log of a long rollout must show that the run lives, and how far it is."""
    progress, trainer, said = Progress(heartbeat_s=0.02), make_trainer(max_steps=10, max_env_steps=5000), []
    progress.on_start(trainer)
    trainer.state.counters.step, trainer.state.counters.env_steps = 3, 1200
    progress.on_step_end(trainer, {"time/env_steps_per_s": 1034.4, "rollout/success_once": 0.25})

    def beats() -> list[str]:
        said.append(capsys.readouterr().out)
        return [line for line in "".join(said).splitlines() if "1,034" in line]

    wait_until(lambda: len(beats()) >= 2, "two heartbeats")
    progress.on_end(trainer)
    line = beats()[0]
    assert line.startswith("step 3/10 · env steps 1,200/5,000 · 1,034 env steps/s · training success 0.25 · elapsed ")


def test_the_thread_ends_with_the_run(make_trainer, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    assert threads() == ["progress"]
    progress.on_end(trainer)
    assert threads() == []
    progress.on_end(trainer)  # harmless


def test_the_end_says_where_the_files_are(make_trainer, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    progress.on_end(trainer)
    assert f"run directory: {trainer.path}" in capsys.readouterr().out


def test_the_last_known_success_stays_when_a_step_ended_no_episode(make_trainer, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    progress.on_step_end(trainer, {"rollout/success_once": 0.5})
    progress.on_step_end(trainer, {"time/env_steps_per_s": 7.0})
    assert "7 env steps/s · training success 0.50" in progress.line(trainer)
    progress.on_end(trainer)


def test_imitation_shows_its_own_limit_and_loss_and_no_env_steps(make_trainer, capsys):
    progress, trainer = Progress(), make_trainer(stage="sft", max_steps=-1)
    progress.on_start(trainer)
    trainer.state.counters.step = 4
    progress.on_step_end(trainer, {"sft/squared_error": 1.2345, "lr": 0.1})
    assert progress.line(trainer).startswith("step 4/8 · squared error 1.234 · elapsed")
    assert done(trainer) == 0.5
    progress.on_end(trainer)


def test_a_validation_is_one_line_with_both_rates_n_and_interval(make_trainer, evaluation, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    result = evaluation((8, 5, 10))
    result.policy_version = 7  # where training has gone on meanwhile, this is not the current step
    progress.on_evaluation_end(trainer, result)
    progress.on_end(trainer)
    out = capsys.readouterr().out
    expected = "success_once 0.80 [0.49, 0.94] n=10 · success_at_end 0.50 [0.24, 0.76] n=10"
    assert f"validate at step 7: {expected}\n" in out
    assert "validated 0.80" in out


def test_a_validation_of_several_tasks_has_a_line_for_each(make_trainer, evaluation, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    progress.on_evaluation_end(trainer, evaluation((8, 5, 10), (0, 0, 10)))
    progress.on_end(trainer)
    lines = capsys.readouterr().out.splitlines()
    assert "success_once 0.40" in lines[1]
    assert lines[2].startswith("  push: success_once 0.80")
    assert lines[3].startswith("  pick: success_once 0.00")


def test_an_evaluation_on_its_own_is_left_to_its_caller(make_trainer, evaluation, capsys):
    progress, trainer = Progress(), make_trainer(stage="validate")
    progress.on_evaluation_end(trainer, evaluation((8, 5, 10)))
    progress.on_end(trainer)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_instead_of_lines(make_trainer, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    progress, trainer = Progress(heartbeat_s=1e-3, refresh_per_second=100.0), make_trainer(max_steps=4)
    progress.on_start(trainer)
    trainer.state.counters.step = 3
    wait_until(lambda: "75%" in sys.stdout.getvalue() and "step 3/4" in sys.stdout.getvalue(), "the bar")
    progress.on_end(trainer)
    assert threads() == []


def test_a_collection_is_counted(capsys):
    said = []
    with Progress(heartbeat_s=0.02).collecting(5) as tell:
        tell(3, 4)

        def told() -> str:
            said.append(capsys.readouterr().out)
            return "".join(said)

        wait_until(lambda: "episodes 3/5 · attempts 4 · elapsed" in told(), "a line")
    assert threads() == []


def test_an_evaluation_on_its_own_is_counted_over_all_tasks(make_trainer, capsys):
    trainer, said = make_trainer(stage="test"), []
    trainer.evaluate_loop = SimpleNamespace(num_episodes=10, finished=7)
    trainer.env = SimpleNamespace(task_names=["push", "pick"])
    with Progress(heartbeat_s=0.02).evaluating(trainer, "test"):

        def told() -> str:
            said.append(capsys.readouterr().out)
            return "".join(said)

        wait_until(lambda: "test episodes 7/20 · elapsed" in told(), "a line")
    assert threads() == []


@pytest.mark.parametrize(
    ("limits", "counters", "share"),
    [
        ({}, (3, 100), None),
        ({"max_steps": 10}, (3, 100), 0.3),
        ({"max_env_steps": 200}, (3, 100), 0.5),
        ({"max_steps": 4, "max_env_steps": 200}, (3, 100), 0.75),
        ({"max_env_steps": 200}, (3, 300), 1.0),
    ],
)
def test_the_share_that_is_done_is_that_of_the_nearest_limit(make_trainer, limits, counters, share):
    trainer = make_trainer(**limits)
    trainer.state.counters.step, trainer.state.counters.env_steps = counters
    assert done(trainer) == share


@pytest.mark.parametrize("name", ["heartbeat_s", "refresh_per_second"])
def test_a_pace_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"progress\.{name}=0.* must be positive"):
        Progress(**{name: 0.0})
