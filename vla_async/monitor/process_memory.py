"""How much memory processes have."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from vla_async.monitor import metric_table as names

MIB = 2**20


def own_mib(pids: Iterable[int]) -> float:
    """Resident memory of processes that is their own, in MiB; one that has ended has none.

    What is mapped from a file or shared is left out: it would be counted once for each process. Memory that a fork has left
    as it was counts for each.
    """
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        pages += resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def device_memory(device: torch.device) -> dict[str, float]:
    """What to log of the trainer's device: the most memory that its tensors took since this was asked last. Of CUDA only."""
    if device.type != "cuda":
        return {}
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {names.DEVICE_MIB: most / MIB}
