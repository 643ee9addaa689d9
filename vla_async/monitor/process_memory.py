"""How much memory processes have."""

from __future__ import annotations

import os
from collections.abc import Iterable

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
