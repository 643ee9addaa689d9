"""``Progress``: what it tells, on a terminal and elsewhere, and that its thread ends."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from tests import fakes
from tests.fakes import wait_until
from vla_async.callbacks import Callback, Progress
from vla_async.callbacks.progress import done, remaining_s
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, StreamingFitLoop
from vla_async.monitor import metric_table
from vla_async.trainer import AsyncTrainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[TextIO], None]:
    """Makes standard output a terminal of 100 columns and 40 lines, in the test: pytest sets it after a fixture."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return lambda terminal: monkeypatch.setattr(sys, "stdout", terminal)


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


def test_the_line_says_who_is_busy_and_how_old_the_data_is(make_trainer, capsys):
    progress, trainer = Progress(), make_trainer()
    progress.on_start(trainer)
    idle = {"worker/idle_share": 0.07, "replica/idle_share": 0.88, "trainer/idle_share": 0.2}
    progress.on_step_end(trainer, idle | {"staleness/mean": 0.8, "staleness/bound": 1.0})
    assert "busy: envs 93%, replicas 12%, trainer 80% · staleness 0.8/1 · elapsed" in progress.line(trainer)
    progress.on_end(trainer)


def test_a_long_update_is_told_of_while_it_runs_and_a_short_one_when_it_has_ended(make_trainer, capsys):
    """With minutes per update, what was true of the last one is old; of a short one, half tells less than the whole."""
    progress, trainer = Progress(), make_trainer()
    now = {"time/update_s": 2.0, "time/env_steps_per_s": 9.0, "env_steps": 70.0}
    trainer.fit_loop.live = lambda trainer: now
    progress.on_start(trainer)
    progress.on_step_end(trainer, {"time/update_s": 60.0, "time/env_steps_per_s": 5.0})
    assert "env steps 0 · 5 env steps/s" in progress.line(trainer)
    assert not progress.state(trainer).so_far
    now["time/update_s"] = 20.0
    assert "env steps 70 · 9 env steps/s" in progress.line(trainer)
    assert progress.state(trainer).so_far
    assert progress.state(trainer).metrics["time/update_s"] == 20.0
    progress.on_end(trainer)


def test_a_terminal_gets_the_live_view_instead_of_lines(make_trainer, evaluation, on_terminal):
    on_terminal(terminal := Terminal())
    progress, trainer = Progress(heartbeat_s=1e-3, refresh_per_second=100.0), make_trainer(max_steps=4)
    progress.on_start(trainer)
    trainer.state.counters.step = 3
    progress.on_step_end(trainer, {"rollout/success_once": 0.25, "worker/idle_share": 0.125})
    progress.on_evaluation_end(trainer, evaluation((8, 5, 10)))
    trainer.validation.note = "validating step 3: 4/9 episodes"
    shown = ["fake · fit", "step 3/4", "75 %", "0.80 [0.49, 0.94] n=10", "0.25", "88% busy", "step 3: 4/9 episodes"]
    wait_until(lambda: all(text in terminal.getvalue() for text in shown), "the view")
    progress.on_end(trainer)
    assert threads() == []
    assert sys.stdout is terminal
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "the cursor is gone"


@pytest.mark.parametrize(("live", "kind"), [(False, "xterm"), (True, "dumb")])
def test_a_terminal_gets_lines_if_that_is_wanted_or_it_can_do_nothing_else(
    make_trainer, on_terminal, monkeypatch, live, kind
):
    on_terminal(terminal := Terminal())
    monkeypatch.setenv("TERM", kind)
    progress, trainer = Progress(heartbeat_s=0.02, live=live), make_trainer(max_steps=4)
    progress.on_start(trainer)
    wait_until(lambda: terminal.getvalue().count("step 0/4 · env steps 0 · elapsed") >= 2, "two heartbeats")
    progress.on_end(trainer)
    assert "\x1b" not in terminal.getvalue()


class Asking(Callback):
    """Asks the loop how the update goes, before each optimizer step and at its end, and fails at the end of the third."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: dict[str, float] = {}
        self.told_at_the_end: dict[str, float] = {}
        self.monkeypatch = monkeypatch

    def on_start(self, trainer: AsyncTrainer) -> None:
        step = trainer.optimizer_step

        def asked(max_grad_norm: float | None) -> float:
            self.told = dict(trainer.fit_loop.live(trainer))
            return step(max_grad_norm)

        self.monkeypatch.setattr(trainer, "optimizer_step", asked)

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self.told_at_the_end = dict(trainer.fit_loop.live(trainer))
        if trainer.state.counters.step == 3:
            raise LookupError("no more")


def test_a_run_on_a_pseudo_terminal_is_shown_and_gives_the_terminal_back_after_an_error(on_terminal, tmp_path, monkeypatch):
    """What a user of a terminal sees of a real run, and what is left of it when the run breaks."""
    primary, secondary = os.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(primary, 65536):
                seen.extend(data)
        except OSError:  # the other end is closed
            pass

    reader, asking = threading.Thread(target=read), Asking(monkeypatch)
    loop = StreamingFitLoop(decisions_per_env=4, update_epochs=1)
    evaluate: dict[str, Any] = {"evaluate_loop": EvaluateLoop(num_episodes=2, num_videos=0), "val_every_n_steps": 2}
    trainer = fakes.make_trainer(tmp_path, fit_loop=loop, max_steps=4, callbacks=[asking], check_memory=False, **evaluate)
    with os.fdopen(secondary, "w") as end:
        on_terminal(end)
        reader.start()
        with pytest.raises(LookupError, match="no more"):
            trainer.fit(fakes.tiny(), ToyEnvs(num_envs=2, batched=True, chunk_size=2, max_episode_steps=6))
        assert sys.stdout is end
    reader.join()
    os.close(primary)
    text = seen.decode()
    for shown in (
        "test · fit · StreamingFitLoop",
        "step 3/4",
        "validated",
        "n=2",
        "env workers",
        "replicas",
        "trainer",
        "% busy",
    ):
        assert shown in text
    assert "staleness" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is gone"
    assert threads() == []
    assert asking.told["time/update_s"] > 0.0
    assert all(0.0 <= asking.told[f"{kind}/idle_share"] <= 1.0 for kind in ("worker", "replica", "trainer"))
    assert [name for name in asking.told if metric_table.find(name) is None] == []
    assert asking.told_at_the_end == {}, "a validation that follows would count as time of the update"
    assert loop.live(trainer) == {}, "it is closed"


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


@pytest.mark.parametrize(
    ("share", "before", "left"), [(0.5, 0.0, 60.0), (0.75, 0.5, 60.0), (1.0, 0.0, 0.0), (0.001, 0.0, None), (0.5, 0.5, None)]
)
def test_the_time_that_is_left_is_that_of_the_pace_since_the_run_was_started(share, before, left):
    """A run that is resumed at 50 % has not done these in its own time."""
    assert remaining_s(60.0, share, before) == left


@pytest.mark.parametrize("name", ["heartbeat_s", "refresh_per_second"])
def test_a_pace_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"progress\.{name}=0.* must be positive"):
        Progress(**{name: 0.0})
