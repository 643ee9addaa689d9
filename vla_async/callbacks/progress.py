"""``Progress``: a bar on a terminal, a line every now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vla_async.callbacks.base import Callback
from vla_async.monitor.report import duration_text, evaluation_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from vla_async.loops.evaluate import EvaluationResult
    from vla_async.trainer import AsyncTrainer


class Progress(Callback):
    """Tells how far a run is, what each validation gave, and where the run's files are.

    Args:
        heartbeat_s: seconds between two lines where standard output is not a terminal; the lines also come while a long
            rollout or evaluation keeps the main thread busy.
        refresh_per_second: how often the bar is drawn on a terminal.
    """

    def __init__(self, heartbeat_s: float = 30.0, refresh_per_second: float = 4.0) -> None:
        if heartbeat_s <= 0:
            raise ValueError(f"progress.heartbeat_s={heartbeat_s} must be positive")
        if refresh_per_second <= 0:
            raise ValueError(f"progress.refresh_per_second={refresh_per_second} must be positive")
        self.heartbeat_s, self.refresh_per_second = heartbeat_s, refresh_per_second
        self._display: _Bar | _Heartbeat | None = None
        self._metrics: Mapping[str, float] = {}
        self._validated: float | None = None

    def on_start(self, trainer: AsyncTrainer) -> None:
        self._metrics, self._validated, self._started = {}, None, time.perf_counter()
        if sys.stdout.isatty():
            self._display = _Bar(self.refresh_per_second)
            self._display.show(self.line(trainer), done(trainer))
        else:
            self._display = _Heartbeat(self.heartbeat_s, lambda: self.line(trainer))
        self._say(f"{trainer.name}: {trainer.state.stage} in {trainer.run.path}")

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self._metrics = dict(metrics)
        if isinstance(self._display, _Bar):
            self._display.show(self.line(trainer), done(trainer))

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        if self._display is None:
            return
        self._validated = result.success().rate
        tasks = result.tasks if len(result.tasks) > 1 else []
        for task in [None, *tasks]:
            name = f"{result.split} at step {trainer.state.counters.step}" if task is None else f"  {task}"
            self._say(f"{name}: {evaluation_line(result, task)}")

    def on_end(self, trainer: AsyncTrainer) -> None:
        if self._display is None:
            return
        self._display.close()
        self._display = None
        self._say(self.line(trainer))
        self._say(f"run directory: {trainer.run.path}")

    def line(self, trainer: AsyncTrainer) -> str:
        """How far the run is, in one line."""
        counters = trainer.state.counters
        steps = max_steps(trainer)
        parts = [f"step {counters.step:,}" + (f"/{steps:,}" if steps > 0 else "")]
        if trainer.state.stage == "fit":
            limit = "" if trainer.max_env_steps is None else f"/{trainer.max_env_steps:,}"
            parts.append(f"env steps {counters.env_steps:,}{limit}")
        if "time/env_steps_per_s" in self._metrics:
            parts.append(f"{self._metrics['time/env_steps_per_s']:,.0f} env steps/s")
        if "rollout/success_once" in self._metrics:
            parts.append(f"success {self._metrics['rollout/success_once']:.2f}")
        if "sft/nll" in self._metrics:
            parts.append(f"nll {self._metrics['sft/nll']:.3f}")
        if self._validated is not None:
            parts.append(f"validated {self._validated:.2f}")
        return " · ".join([*parts, f"elapsed {duration_text(time.perf_counter() - self._started)}"])

    def _say(self, text: str) -> None:
        print(text, flush=True)  # the bar, while it is there, moves below what is printed


def max_steps(trainer: AsyncTrainer) -> int:
    """The limit on steps of what is running, -1 for none."""
    return trainer.sft_loop.max_steps if trainer.state.stage == "sft" else trainer.max_steps


def done(trainer: AsyncTrainer) -> float | None:
    """The share of the budget that is spent, in [0, 1]; None for a run without one."""
    counters, shares = trainer.state.counters, []
    if (steps := max_steps(trainer)) > 0:
        shares.append(counters.step / steps)
    if trainer.max_env_steps is not None and trainer.state.stage == "fit":
        shares.append(counters.env_steps / trainer.max_env_steps)
    return min(max(shares), 1.0) if shares else None


class _Heartbeat:
    """A thread that prints a line every ``seconds``, whatever the main thread does."""

    def __init__(self, seconds: float, line: Callable[[], str]) -> None:
        self._seconds, self._line, self._ended = seconds, line, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            print(self._line(), flush=True)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class _Bar:
    """rich's bar, with the line beside it."""

    def __init__(self, refresh_per_second: float) -> None:
        from rich import progress

        columns = progress.BarColumn(bar_width=24), progress.TaskProgressColumn(), progress.TimeRemainingColumn(compact=True)
        line = progress.TextColumn("{task.description}", markup=False)
        self._bar: RichProgress = progress.Progress(*columns, line, refresh_per_second=refresh_per_second)
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def show(self, line: str, share: float | None) -> None:
        # a total of None makes the bar pulse
        self._bar.update(self._task, description=line, total=None if share is None else 1.0, completed=share)

    def close(self) -> None:
        self._bar.stop()
