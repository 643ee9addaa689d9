"""However a rank ends, the whole run does, soon: with an error that names it, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import started_processes
from tests.fakes import wait_until
from tests.faults.test_ends import REPOSITORY, processes_of_session, said, wait_for_step
from tests.rank_cases import LOCKSTEP, Case, both_ranks, rank_1
from vla_async import links
from vla_async.callbacks import Callback
from vla_async.links import RankError
from vla_async.state import read_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
SETTINGS: dict[str, Any] = {"strategy": "size_weighted_ddp", "num_ranks": 2, "max_steps": -1}


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("streamer", [True, False])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("killed", r"rank 1 \(pid \d+\) ended; the run ends"),
        ("raises", r"rank 1 \(pid \d+\) failed: KeyError: 'broken data'; the run ends"),
    ],
)
def test_a_rank_that_ends_ends_rank_0_which_keeps_a_checkpoint(
    fault: str, message: str, streamer: bool, tmp_path: Path
) -> None:
    case = Case(tmp_path, loop=LOCKSTEP | {"streamer": streamer, "train_async": streamer}, fault=(1, fault), **SETTINGS)
    with rank_1(case) as process:
        with pytest.raises(RankError, match=message):
            case.run()
        process.join(20.0)
        assert process.exitcode == (-signal.SIGKILL if fault == "killed" else 1)
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] >= 0


def test_a_rank_0_that_raises_ends_the_others(tmp_path: Path) -> None:
    case = Case(tmp_path, fault=(0, "raises"), **SETTINGS)
    with rank_1(case) as process:
        with pytest.raises(KeyError, match="broken data"):
            case.run()
        process.join(20.0)
        assert process.exitcode == 1


def test_a_rank_that_hangs_is_named_after_the_time_out(tmp_path: Path) -> None:
    """And is ended when rank 0 has ended, although its main thread never comes back."""
    case = Case(tmp_path, fault=(1, "/never"), timeout_s=3.0, **SETTINGS)
    with rank_1(case) as process:
        with pytest.raises(RuntimeError, match=r"rank 0 came to the end of a mini-batch, but rank 1 had not come"):
            case.run()
        process.join(20.0)
        assert process.exitcode == 1


def test_a_rank_0_that_hangs_is_ended_by_what_listens_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank gives up after the time-out, and rank 0 gets as long again to notice."""
    messages: list[str] = []

    def leave(message: str) -> None:
        messages.append(message)
        (tmp_path / "go on").touch()  # in place of the end of the process

    monkeypatch.setattr(links, "_leave", leave)
    case = Case(tmp_path, fault=(0, str(tmp_path / "go on")), timeout_s=3.0, **SETTINGS)
    with rank_1(case) as process:
        with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) failed: RuntimeError: .*but rank 0 had not come"):
            case.run()
        process.join(20.0)
        assert process.exitcode == 1
    assert [message.endswith("and so does rank 0, which has not noticed for 3 s") for message in messages] == [True]


class Interrupts(Callback):
    """Sends SIGINT to both ranks after the second step, as a terminal does."""

    rank_1: Any = None

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.state.counters.step == 2:
            os.kill(self.rank_1.pid, signal.SIGINT)
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_for_rank_0_which_ends_the_others(tmp_path: Path) -> None:
    interrupts = Interrupts()
    case = Case(tmp_path, **SETTINGS)
    with rank_1(case) as process:
        interrupts.rank_1, case.callbacks = process, (interrupts,)
        with pytest.raises(KeyboardInterrupt, match="SIGINT"):
            case.run()
        process.join(20.0)
        assert process.exitcode == 1
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] == 2


def test_a_killed_rank_0_ends_the_others_and_its_workers(tmp_path: Path) -> None:
    before = started_processes()
    with both_ranks(Case(tmp_path, fault=(0, "killed"), **SETTINGS)) as processes:
        processes[0].join(100.0)
        assert processes[0].exitcode == -signal.SIGKILL
        processes[1].join(20.0)
        assert processes[1].exitcode == 1
        wait_until(lambda: not started_processes().keys() - before.keys(), "no process is left")


@contextmanager
def two_ranks(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose command runs again for the other rank; in the end no process of it may be left."""
    command = [sys.executable, "-m", "tests.faults.ranks_run", str(directory)]
    with (directory / "stdout").open("w") as out, (directory / "stderr").open("w") as err:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(REPOSITORY)}
        streams: dict[str, Any] = {"stdout": out, "stderr": err, "text": True}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True, **streams)
    try:
        yield process
        process.wait(timeout=100)
        wait_until(lambda: not processes_of_session(process.pid), "no process is left", seconds=30.0)
    finally:
        for pid in processes_of_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_rank_that_rank_0_has_started_is_named_with_its_signal(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as process:
        wait_for_step(process, tmp_path, 2)
        os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
    assert process.returncode == 1
    assert "was killed by SIGKILL; the run ends" in said(tmp_path)


def test_ctrl_c_ends_a_run_in_which_a_rank_hangs(tmp_path: Path) -> None:
    """Rank 0 waits for it outside of Python, where it would hear of no signal for half an hour."""
    with two_ranks(tmp_path) as process:
        wait_for_step(process, tmp_path, 2)
        os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGSTOP)
        time.sleep(1.0)  # it is waited for
        process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in said(tmp_path)
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] >= 2


def test_ctrl_c_twice_while_the_ranks_come_together_leaves_none_behind(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as process:
        wait_until(lambda: len(processes_of_session(process.pid)) > 1, "the other rank is started", seconds=100.0)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
    assert "KeyboardInterrupt" in said(tmp_path)
