"""However the process that owns a rollout ends: nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing

from tests.fakes import is_running, wait_until
from tests.faults.held_rollout import hold_a_rollout

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def shared_memory_of(pids: list[int]) -> list[str]:
    """What torch has left in /dev/shm under the names of some processes, and what they still map."""
    named = [path.name for path in Path("/dev/shm").glob("torch_*") if int(path.name.split("_")[1]) in pids]
    return named + [str(pid) for pid in pids if is_running(pid)]


@pytest.mark.parametrize("lets_go", [False, True], ids=["killed", "without shutdown"])
def test_nothing_is_left_of_a_rollout_whose_owner_ends(lets_go: bool, tmp_path: Path) -> None:
    """Killed, which nobody can tell its workers; or at its end, with a collector that nobody shut down.

    One of the workers hangs, so it would not notice by itself; another sleeps until there are slots for it.
    """
    context = torch.multiprocessing.get_context("forkserver")
    owner = context.Process(target=hold_a_rollout, args=(tmp_path, lets_go))
    owner.start()
    wait_until((tmp_path / "pids").exists, "it runs")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    if not lets_go:
        assert all(map(is_running, pids))
        owner.kill()
    owner.join()
    assert owner.exitcode == (0 if lets_go else -9)
    owner.close()
    wait_until(lambda: not shared_memory_of(pids), "processes and shared memory end")
