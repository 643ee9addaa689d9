"""Runs in processes of their own that are ended from outside: nothing may be left, and nothing lost."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from tests.fakes import ClockEnvs, is_running, make_trainer, tiny, wait_until
from tests.faults.toy_run import ENDLESS, STREAMING, hold_a_hanging_pool
from vla_async.envs import EnvFactory, ToyEnvs
from vla_async.state import read_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
REPOSITORY = Path(__file__).parents[2]


def processes_of_session(session: int) -> dict[int, str]:
    """All living processes that a run has started, by id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found[int(entry.name)] = command
    return found


@contextmanager
def run(root: Path, mode: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A toy run, the leader of a session of its own, as in a terminal."""
    command = [sys.executable, *options, "-m", "tests.faults.toy_run", str(root), mode]
    with (root / "stdout").open("w") as out, (root / "stderr").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(REPOSITORY)},
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in processes_of_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def said(root: Path) -> str:
    return (root / "stdout").read_text() + (root / "stderr").read_text()


def wait_for_step(process: subprocess.Popen[str], root: Path, step: int) -> None:
    """Until metrics.csv has this step."""

    def reached() -> bool:
        assert process.poll() is None, said(root)
        rows = [row for path in root.glob("test/*/metrics.csv") for row in csv.DictReader(path.read_text().splitlines())]
        return any(row["step"] == str(step) for row in rows)

    wait_until(reached, f"step {step}", seconds=200.0)


def resume(root: Path, envs: EnvFactory, options: dict[str, Any] = ENDLESS) -> int:
    """Two steps more from what the run left; returns the step that it had reached."""
    [last] = root.glob("test/*/checkpoints/last.ckpt")
    reached = int(read_checkpoint(last)["counters"]["step"])
    trainer = make_trainer(root, **(options | {"max_steps": reached + 2}))
    trainer.fit(tiny(), envs, ckpt_path=str(last))
    assert trainer.state.counters.step == reached + 2
    return reached


@pytest.mark.parametrize(("mode", "options"), [("endless", ENDLESS), ("streaming", STREAMING)])
def test_ctrl_c_ends_a_run_with_a_checkpoint_and_nothing_left_behind(
    mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A terminal sends it to every process of the run at once; twice, if the user is in a hurry.

    Python's development mode tells of files, sockets and processes that were left to the garbage collector.
    """
    with run(tmp_path, mode, "-X", "dev", "-W", "error::ResourceWarning") as process:
        wait_for_step(process, tmp_path, 2)
        assert len(processes_of_session(process.pid)) >= 5, "the run and the workers of training and evaluation"
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=200)
        wait_until(lambda: not processes_of_session(process.pid), "no process is left")
    assert process.returncode != 0
    assert "KeyboardInterrupt: SIGINT" in said(tmp_path)
    assert "env worker" not in said(tmp_path), "workers took part in the interrupt"
    assert not re.search("ResourceWarning|leaked", said(tmp_path)), said(tmp_path)
    assert list(tmp_path.glob("test/*/videos/*.mp4")), "the evaluation that came first is part of the case"
    assert resume(tmp_path, ToyEnvs(num_envs=2), options) >= 2


def test_sigterm_ends_a_run_whose_worker_hangs(tmp_path: Path) -> None:
    """A scheduler's signal reaches all processes too, and a simulator that hangs does not answer to anything."""
    with run(tmp_path, "hanging") as process:
        wait_until((tmp_path / "hangs").exists, "a worker hangs", seconds=200.0)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=200)
        wait_until(lambda: not processes_of_session(process.pid), "no process is left")
    assert "KeyboardInterrupt: SIGTERM" in said(tmp_path)
    assert resume(tmp_path, ClockEnvs()) >= 1


def test_a_killed_run_leaves_no_worker_behind(tmp_path: Path) -> None:
    """Not even one that hangs: the kernel's memory killer leaves nobody to tell it."""
    context = torch.multiprocessing.get_context("forkserver")
    owner = context.Process(target=hold_a_hanging_pool, args=(tmp_path,))
    owner.start()
    wait_until((tmp_path / "hangs").exists, "a worker hangs")
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2
    assert all(map(is_running, workers))
    owner.kill()
    owner.join()
    owner.close()
    wait_until(lambda: not any(map(is_running, workers)), "the workers end")
