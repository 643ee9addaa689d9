"""A process's own memory: what it has alone, and nothing for one that has ended."""

from __future__ import annotations

import mmap
import os
import subprocess

import pytest
import torch

from vla_async.monitor import metric_table as names
from vla_async.monitor.process_memory import device_memory, own_mib

SIZE = 64


def test_what_is_shared_is_not_a_process_s_own() -> None:
    """The slab is mapped by all processes: it would be counted once for each."""
    before = own_mib([os.getpid()])
    with mmap.mmap(-1, SIZE * 2**20) as shared:  # anonymous, and shared with whoever is forked
        shared.write(b"1" * (SIZE * 2**20))
        with_shared = own_mib([os.getpid()])
    with mmap.mmap(-1, SIZE * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        private.write(b"1" * (SIZE * 2**20))
        with_private = own_mib([os.getpid()])
    assert with_shared - before < 0.5 * SIZE
    assert with_private - before > 0.9 * SIZE
    assert own_mib([os.getpid(), os.getpid()]) > 1.5 * before


def test_a_process_that_has_ended_has_none() -> None:
    """A worker may be replaced at any moment."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert own_mib([process.pid]) == 0.0


def test_the_device_tells_its_peak_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that is never reset would be that of the first step for ever; a CPU has no memory of its own to tell of."""
    peaks = [3 * 2**20]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.append(2**20))
    cuda = torch.device("cuda", 0)
    assert [device_memory(cuda)[names.DEVICE_MIB] for _ in range(2)] == [3.0, 1.0]
    assert device_memory(torch.device("cpu")) == {}
