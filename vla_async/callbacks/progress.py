"""``Progress``: a live view on a terminal, a line every now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from vla_async.callbacks.base import Callback
from vla_async.monitor import metric_table as names
from vla_async.monitor.live import LiveState
from vla_async.monitor.live_area import LiveArea, terminal
from vla_async.monitor.metrics import SuccessRate
from vla_async.monitor.report import duration_text, evaluation_line
from vla_async.monitor.sparkline import Curve

if TYPE_CHECKING:
    from vla_async.loops.base import Loop
    from vla_async.loops.evaluate import EvaluationResult
    from vla_async.trainer import AsyncTrainer

_SETTLED_S = 3.0  # an update has run so long before its own figures tell more than those of the one before
_LEAST_SHARE = 0.005  # of the budget, from which the time that is left can be estimated


class Progress(Callback):
    """Tells how far a run is, what each validation gave, and where the run's files are.

    On a terminal it draws a live view below what is printed; elsewhere it prints a line now and then.

    Args:
        heartbeat_s: seconds between two lines where there is no live view; the lines also come while a long rollout or
            evaluation keeps the main thread busy.
        refresh_per_second: how often the live view is drawn.
        live: draw the live view on a terminal; off, there are lines as elsewhere.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    def __init__(self, heartbeat_s: float = 30.0, refresh_per_second: float = 1.0, live: bool = True) -> None:
        if heartbeat_s <= 0:
            raise ValueError(f"progress.heartbeat_s={heartbeat_s} must be positive")
        if refresh_per_second <= 0:
            raise ValueError(f"progress.refresh_per_second={refresh_per_second} must be positive")
        self.heartbeat_s, self.refresh_per_second, self.live = heartbeat_s, refresh_per_second, live
        self._open = ExitStack()
        self._running = False
        self._forget()

    def _forget(self) -> None:
        self._metrics: Mapping[str, float] = {}
        self._validated: list[SuccessRate] = []
        self._curves: dict[str, Curve] = {}

    def on_start(self, trainer: AsyncTrainer) -> None:
        self._forget()
        self._running, self._started, self._done_before = True, time.perf_counter(), done(trainer) or 0.0
        origin = "" if trainer.origin is None else f", from {trainer.origin}"
        _say(f"{trainer.name}: {trainer.state.stage} in {trainer.run.path}{origin}")
        self._open.enter_context(self.watch(lambda: (self.line(trainer), done(trainer)), lambda: self.state(trainer)))

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self._metrics = {**self._metrics, **metrics}  # not every step ends an episode
        for name, value in metrics.items():
            if name == names.ROLLOUT_SUCCESS_ONCE.of() or name.startswith("sft/"):
                if name not in self._curves:
                    self._curves = {**self._curves, name: Curve()}  # another dict: the view may be reading this one
                self._curves[name].add(value)

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        if not self._running:
            return
        self._validated.append(result.success())
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

    # ------------------------------------------------------------------ watching

    @contextmanager
    def watch(
        self, look: Callable[[], tuple[str, float | None]], state: Callable[[], LiveState] | None = None
    ) -> Iterator[None]:
        """Show again and again how far something is, from a thread, until the block is left.

        Args:
            look: returns a line and the share that is done, in [0, 1], or None if there is no end in sight.
            state: returns what the live view shows, where there is one; by default what ``look`` tells.
        """
        started = time.perf_counter()

        def seen() -> LiveState:
            line, share = look()
            return LiveState((line,), time.perf_counter() - started, share)

        with ExitStack() as stack:
            if self.live and (console := terminal()) is not None:
                area, see = stack.enter_context(LiveArea(console)), state or seen
                stack.enter_context(_repeating(1.0 / self.refresh_per_second, lambda: area.draw(see()), at_ends=True))
            else:
                stack.enter_context(_repeating(self.heartbeat_s, lambda: _say(look()[0])))
            yield

    @contextmanager
    def collecting(self, wanted: int) -> Iterator[Callable[[int, int], None]]:
        """Watch a collection of ``wanted`` episodes; yields what is to be told (successes, attempts) of it."""
        counts = [0, 0]

        def tell(successes: int, attempts: int) -> None:
            counts[:] = successes, attempts

        def parts() -> tuple[list[str], float]:
            successes, attempts = min(counts[0], wanted), counts[1]
            return [f"episodes {successes:,}/{wanted:,}", f"attempts {attempts:,}"], successes / wanted

        with self._counting(parts, "collect demonstrations"):
            yield tell

    @contextmanager
    def evaluating(self, trainer: AsyncTrainer, split: str) -> Iterator[None]:
        """Watch an evaluation that stands on its own."""
        loop = trainer.evaluate_loop
        wanted = loop.num_episodes * len(trainer.env.task_names)

        def parts() -> tuple[list[str], float]:
            finished = loop.finished
            return [f"{split} episodes {finished:,}/{wanted:,}"], finished / wanted

        with self._counting(parts, f"{trainer.name} · {split}", str(trainer.run.path)):
            yield

    @contextmanager
    def _counting(self, parts: Callable[[], tuple[list[str], float]], title: str, place: str = "") -> Iterator[None]:
        """Watch something that is counted; ``parts`` returns what is told of it, and the share that is done."""
        started = time.perf_counter()

        def look() -> tuple[str, float]:
            told, share = parts()
            return " · ".join([*told, f"elapsed {duration_text(time.perf_counter() - started)}"]), share

        def state() -> LiveState:
            told, share = parts()
            elapsed_s = time.perf_counter() - started
            return LiveState(told, elapsed_s, share, remaining_s(elapsed_s, share), title, place)

        with self.watch(look, state):
            yield

    # ------------------------------------------------------------------ what is known of a run

    def state(self, trainer: AsyncTrainer) -> LiveState:
        """What the live view shows of the run."""
        live, elapsed_s = self._live_metrics(trainer), time.perf_counter() - self._started
        share = done(trainer)
        return LiveState(
            counts=self._counts(trainer, live),
            elapsed_s=elapsed_s,
            share=share,
            remaining_s=None if share is None else remaining_s(elapsed_s, share, self._done_before),
            title=f"{trainer.name} · {trainer.state.stage} · {type(_loop(trainer)).__name__}",
            place=str(trainer.run.path),
            metrics={**self._metrics, **live},
            so_far=bool(live),
            validated=tuple(self._validated),
            curves={name: curve.values for name, curve in self._curves.items()},
            note=trainer.validation.note,
        )

    def line(self, trainer: AsyncTrainer) -> str:
        """How far the run is, in one line."""
        live = self._live_metrics(trainer)
        metrics = {**self._metrics, **live}
        parts = self._counts(trainer, live)
        if names.ENV_STEPS_PER_S in metrics:
            parts.append(f"{metrics[names.ENV_STEPS_PER_S]:,.0f} env steps/s")
        if (success := names.ROLLOUT_SUCCESS_ONCE.of()) in metrics:
            parts.append(f"training success {metrics[success]:.2f}")
        losses = {name: value for name, value in metrics.items() if name.startswith("sft/")}
        parts += [f"{name.removeprefix('sft/').replace('_', ' ')} {value:.3f}" for name, value in losses.items()]
        if self._validated:
            parts.append(f"validated {self._validated[-1].rate:.2f}")
        idle = {"envs": names.WORKER_IDLE, "replicas": names.REPLICA_IDLE, "trainer": names.TRAINER_IDLE}
        if busy := [f"{name} {1.0 - metrics[idle[name]]:.0%}" for name in idle if idle[name] in metrics]:
            parts.append(f"busy: {', '.join(busy)}")
        if names.STALENESS_MEAN in metrics and names.STALENESS_BOUND in metrics:
            parts.append(f"staleness {metrics[names.STALENESS_MEAN]:.1f}/{metrics[names.STALENESS_BOUND]:.0f}")
        if note := trainer.validation.note:
            parts.append(note)
        return " · ".join([*parts, f"elapsed {duration_text(time.perf_counter() - self._started)}"])

    def _live_metrics(self, trainer: AsyncTrainer) -> Mapping[str, float]:
        """Those of the update that runs, once it has run for a while; nothing else."""
        live = _loop(trainer).live(trainer)
        return live if live.get(names.UPDATE_S, 0.0) >= _SETTLED_S else {}

    def _counts(self, trainer: AsyncTrainer, live: Mapping[str, float]) -> list[str]:
        counters, steps = trainer.state.counters, max_steps(trainer)
        parts = [f"step {counters.step:,}" + (f"/{steps:,}" if steps > 0 else "")]
        if trainer.state.stage == "fit":
            limit = "" if trainer.max_env_steps is None else f"/{trainer.max_env_steps:,}"
            parts.append(f"env steps {int(live.get(names.ENV_STEPS, counters.env_steps)):,}{limit}")
        return parts


def _loop(trainer: AsyncTrainer) -> Loop:
    """What is running."""
    return trainer.sft_loop if trainer.state.stage == "sft" else trainer.fit_loop


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


def remaining_s(elapsed_s: float, share: float, before: float = 0.0) -> float | None:
    """How many seconds are left at the pace so far; None while it is too early to say.

    Args:
        elapsed_s: seconds in which the share that is done rose from ``before`` to ``share``.
        share: in [0, 1].
        before: in [0, 1].
    """
    gained = share - before
    return elapsed_s * (1.0 - share) / gained if gained >= _LEAST_SHARE else None


def _say(text: str) -> None:
    print(text, flush=True)  # a live view that is there moves below what is printed


@contextmanager
def _repeating(every_s: float, do: Callable[[], None], at_ends: bool = False) -> Iterator[None]:
    """Call ``do`` again and again, from a thread; ``at_ends`` also when the block begins, and once more when it is left."""
    ended = threading.Event()

    def beat() -> None:
        if at_ends:
            do()
        while not ended.wait(every_s):
            do()
        if at_ends:
            do()

    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
