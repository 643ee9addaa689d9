"""``Progress``: a bar on a terminal, a line every now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vla_async.callbacks.base import Callback
from vla_async.monitor.report import duration_text, evaluation_line

if TYPE_CHECKING:
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
        self._open = ExitStack()
        self._running = False
        self._metrics: Mapping[str, float] = {}
        self._validated: float | None = None

    def on_start(self, trainer: AsyncTrainer) -> None:
        self._metrics, self._validated, self._running = {}, None, True
        self._started = time.perf_counter()
        origin = "" if trainer.origin is None else f", from {trainer.origin}"
        _say(f"{trainer.name}: {trainer.state.stage} in {trainer.run.path}{origin}")
        self._open.enter_context(self.watch(lambda: (self.line(trainer), done(trainer))))

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self._metrics = {**self._metrics, **metrics}  # not every step ends an episode

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        if not self._running:
            return
        self._validated = result.success().rate
        _say(f"{result.split} at step {result.policy_version}: {evaluation_line(result)}")
        for task in result.tasks if len(result.tasks) > 1 else []:
            _say(f"  {task}: {evaluation_line(result, task)}")

    def on_end(self, trainer: AsyncTrainer) -> None:
        if not self._running:
            return
        self._running = False
        self._open.close()
        _say(self.line(trainer))
        _say(f"run directory: {trainer.run.path}")

    @contextmanager
    def watch(self, look: Callable[[], tuple[str, float | None]]) -> Iterator[None]:
        """Show again and again what ``look`` tells, from a thread, until the block is left.

        Args:
            look: returns a line and the share that is done, in [0, 1], or None if there is no end in sight.
        """
        on_terminal = sys.stdout.isatty()
        every_s = 1.0 / self.refresh_per_second if on_terminal else self.heartbeat_s
        with _bar(self.refresh_per_second) if on_terminal else nullcontext(_print_line) as show:
            ended = threading.Event()

            def beat() -> None:
                while not ended.wait(every_s):
                    show(*look())

            thread = threading.Thread(target=beat, name="progress", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    @contextmanager
    def collecting(self, wanted: int) -> Iterator[Callable[[int, int], None]]:
        """Watch a collection of ``wanted`` episodes; yields what is to be told (successes, attempts) of it."""
        started, counts = time.perf_counter(), [0, 0]

        def tell(successes: int, attempts: int) -> None:
            counts[:] = successes, attempts

        def look() -> tuple[str, float]:
            successes, attempts = min(counts[0], wanted), counts[1]
            line = f"episodes {successes:,}/{wanted:,} · attempts {attempts:,}"
            return f"{line} · elapsed {duration_text(time.perf_counter() - started)}", successes / wanted

        with self.watch(look):
            yield tell

    @contextmanager
    def evaluating(self, trainer: AsyncTrainer, split: str) -> Iterator[None]:
        """Watch an evaluation that stands on its own."""
        loop, started = trainer.evaluate_loop, time.perf_counter()
        wanted = loop.num_episodes * len(trainer.env.task_names)

        def look() -> tuple[str, float]:
            elapsed = duration_text(time.perf_counter() - started)
            return f"{split} episodes {loop.finished:,}/{wanted:,} · elapsed {elapsed}", loop.finished / wanted

        with self.watch(look):
            yield

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
            parts.append(f"training success {self._metrics['rollout/success_once']:.2f}")
        losses = {name: value for name, value in self._metrics.items() if name.startswith("sft/")}
        parts += [f"{name.removeprefix('sft/').replace('_', ' ')} {value:.3f}" for name, value in losses.items()]
        if self._validated is not None:
            parts.append(f"validated {self._validated:.2f}")
        if note := trainer.validation.note:
            parts.append(note)
        return " · ".join([*parts, f"elapsed {duration_text(time.perf_counter() - self._started)}"])


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


def _say(text: str) -> None:
    print(text, flush=True)  # a bar that is there moves below what is printed


def _print_line(line: str, share: float | None) -> None:
    _say(line)


@contextmanager
def _bar(refresh_per_second: float) -> Iterator[Callable[[str, float | None], None]]:
    """A bar drawn by rich; yields what sets it."""
    from rich import progress

    columns = progress.BarColumn(bar_width=24), progress.TaskProgressColumn(), progress.TimeRemainingColumn(compact=True)
    text = progress.TextColumn("{task.description}", markup=False)
    with progress.Progress(*columns, text, refresh_per_second=refresh_per_second) as bar:
        task = bar.add_task("", total=None)

        def show(line: str, share: float | None) -> None:
            bar.update(task, description=line, total=None if share is None else 1.0, completed=share)

        yield show
