"""What the live view costs: CPU time of the thread that draws it, while a run does next to nothing else.

    python -m benchmarks.live_view [--seconds 30] [--refresh-per-second 1.0]

A run of ``fit`` in a process of its own, on a pseudo-terminal of 120 × 40, in envs that sleep. Each update takes some
seconds, so that the view asks the loop how it goes. The kernel tells the thread's CPU time (``CLOCK_THREAD_CPUTIME_ID``).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

WIDTH, HEIGHT = 120, 40
LIMIT = 0.01  # of a core
_STEP_S, _CHUNK, _DECISIONS, _ENVS = 0.04, 5, 32, 8  # an update of some six seconds


@dataclass(frozen=True)
class Cost:
    """What was measured.

    Attributes:
        share: CPU seconds per second.
        draw_ms: CPU milliseconds per drawing.
        draws: how many there were.
        seconds: of the measurement.
        shown: what the terminal was sent last.
    """

    share: float
    draw_ms: float
    draws: int
    seconds: float
    shown: str = ""


def measure(seconds: float, refresh_per_second: float) -> Cost:
    """Run on a pseudo-terminal, and read what the process has measured.

    Raises:
        RuntimeError: if it failed; with what it had printed.
    """
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    said = bytearray()

    def read() -> None:
        try:
            while data := os.read(primary, 65536):
                said.extend(data)
        except OSError:  # the last process that had the terminal has ended
            pass

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.live_view", "--inside", folder, "--seconds", str(seconds)]
        command += ["--refresh-per-second", str(refresh_per_second)]
        # the size is the terminal's, not one that this process was told
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(
            command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment | {"TERM": "xterm-256color"}
        )
        os.close(secondary)
        reader = threading.Thread(target=read)
        reader.start()
        code = process.wait()
        reader.join()
        os.close(primary)
        text = said.decode(errors="replace")
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{text[-4000:]}")
        return Cost(**json.loads((Path(folder) / "cost.json").read_text()), shown=text)


def run(folder: Path, seconds: float, refresh_per_second: float) -> None:
    """The run; writes ``cost.json`` into ``folder``."""
    from vla_async.callbacks import Callback, Progress
    from vla_async.emulation import Constant, EmulatedEnvs
    from vla_async.loops import StreamingFitLoop
    from vla_async.monitor.live import LiveState
    from vla_async.objectives import PPO
    from vla_async.policies import TinyVLAPolicy
    from vla_async.trainer import AsyncTrainer

    class Measured(Progress):
        """Notes when each drawing begins, and what CPU time its thread has had."""

        def __init__(self) -> None:
            super().__init__(refresh_per_second=refresh_per_second)
            self.times: list[tuple[float, float]] = []

        def state(self, trainer: AsyncTrainer) -> LiveState:
            self.times.append((time.perf_counter(), time.thread_time()))
            return super().state(trainer)

    class Stop(Callback):
        """Ends the run after its time."""

        def on_start(self, trainer: AsyncTrainer) -> None:
            self._until = time.perf_counter() + seconds

        def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
            trainer.state.stopped = time.perf_counter() > self._until

    measured = Measured()
    loop = StreamingFitLoop(decisions_per_env=_DECISIONS, update_epochs=1)
    trainer = AsyncTrainer(fit_loop=loop, accelerator="cpu", root_dir=folder, name="idle", callbacks=[measured, Stop()])
    envs = EmulatedEnvs(num_envs=_ENVS, chunk_size=_CHUNK, max_episode_steps=50, step_time=Constant(_STEP_S))
    trainer.fit(TinyVLAPolicy(objective=PPO(), hidden=(32, 32)), envs)
    (began, cpu_before), (ended, cpu_after) = measured.times[0], measured.times[-1]
    draws = len(measured.times) - 1
    cost = Cost((cpu_after - cpu_before) / (ended - began), 1e3 * (cpu_after - cpu_before) / draws, draws, ended - began)
    (folder / "cost.json").write_text(json.dumps({name: value for name, value in vars(cost).items() if name != "shown"}))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if it costs too much."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.live_view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="at least so long, up to the end of an update")
    parser.add_argument("--refresh-per-second", type=float, default=1.0, help="drawings per second")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--show", type=Path, help="file for all that the terminal was sent")
    args = parser.parse_args(argv)
    if args.inside is not None:
        run(args.inside, args.seconds, args.refresh_per_second)
        return 0
    cost = measure(args.seconds, args.refresh_per_second)
    if args.show is not None:
        args.show.write_text(cost.shown)
    print(
        f"live view, {WIDTH} × {HEIGHT}: {cost.share:.2%} of a core, limit {LIMIT:.0%} "
        f"({cost.draws} drawings in {cost.seconds:.1f} s, {cost.draw_ms:.1f} ms each)"
    )
    return int(cost.share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
