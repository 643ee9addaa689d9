"""What every test gets: one thread per process, no processes left behind, property tests without deadlines."""

from __future__ import annotations

import os

# Read when torch and NumPy start, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
# of what Lightning's own command line calls; jsonargparse 5, which drops it, is excluded
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("vla_async", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("vla_async")


def child_processes(parent: int) -> dict[int, str]:
    """The living children of a process by id, each with its command line; empty where there is no /proc."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        state, its_parent = fields[0], int(fields[1])
        if its_parent == parent and state != "Z":
            children[int(entry.name)] = command
    return children


def started_processes() -> dict[int, str]:
    """What the tests have started: the children of this process, and those of its fork server, which look like it.

    Left out is what serves the whole test process: the fork server itself, and the tracker of resources.
    """
    children = child_processes(os.getpid())
    workers = [child_processes(pid) for pid, command in children.items() if "forkserver" in command]
    own = {pid: text for pid, text in children.items() if "resource_tracker" not in text and "forkserver" not in text}
    return {pid: command for group in [own, *workers] for pid, command in group.items()}


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a child process behind; it gets some seconds to end what it has told to end."""
    before = started_processes()
    yield
    give_up = time.monotonic() + 5.0
    while True:
        left = {pid: command for pid, command in started_processes().items() if pid not in before}
        if not left:
            return
        if time.monotonic() > give_up:
            pytest.fail(f"the test left processes behind: {left}")
        time.sleep(0.05)
