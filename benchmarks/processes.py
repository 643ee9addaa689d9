"""What a process and all its descendants use, from ``/proc``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """Of a process tree, in MB of 10^6 bytes: ``pss`` counts what processes share once, ``rss`` once for each of them."""

    pss: float
    rss: float


def tree(root: int) -> list[int]:
    """The process ``root`` and its living descendants."""
    children: dict[int, list[int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if stat := _stat(pid):
            children.setdefault(int(stat[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(root: int) -> float:
    """CPU seconds that the tree has used, with those of children that have ended."""
    return sum(sum(map(int, stat[11:15])) for pid in tree(root) if (stat := _stat(pid))) * _TICK_S


def memory(root: int) -> Memory:
    """The memory that the tree holds now."""
    totals = {"Pss:": 0, "Rss:": 0}
    for pid in tree(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        for words in map(str.split, lines):
            if words[0] in totals:
                totals[words[0]] += int(words[1])
    return Memory(pss=totals["Pss:"] * 1024 / 1e6, rss=totals["Rss:"] * 1024 / 1e6)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty for a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
