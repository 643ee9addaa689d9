"""A trace file can be opened at any time, and a disk that takes no more of it keeps nobody from training."""

from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vla_async.monitor.timeline_file import TraceFile, event


def instant(number: int) -> str:
    return event("i", f"event {number}", 1, 1, ts=number, s="t")


def numbers(path: Path) -> list[int]:
    content: dict[str, Any] = json.loads(path.read_text())
    return [event["ts"] for event in content["traceEvents"]]


def test_the_file_is_whole_after_every_append(tmp_path: Path) -> None:
    """So it is after the process was killed, which nobody could close it after."""
    file = TraceFile(tmp_path / "trace.json")
    assert numbers(file.path) == []
    for turn in range(3):
        file.append([instant(2 * turn), instant(2 * turn + 1)])
        file.append([])
        assert numbers(file.path) == [*range(2 * turn + 2)]
    file.close()
    file.close()
    file.append([instant(9)])
    assert numbers(file.path) == [*range(6)]


def test_an_append_that_was_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C between writing and remembering where that ended: the next append is shorter, and must not end in its rest."""
    file = TraceFile(tmp_path / "trace.json")
    end = file._end
    file.append([instant(number) for number in range(50)])
    file._end = end
    file.append([instant(7)])
    assert numbers(file.path) == [7]
    file.close()


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """A real limit of the kernel: it takes a part of a write, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_told_of_once_and_what_there_is_can_be_opened(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.append([instant(0)])
    with files_of_at_most(file.path.stat().st_size + 100):
        with pytest.warns(UserWarning, match=r"no more events in .*trace.json, and the run goes on without: File too large"):
            file.append([instant(number) for number in range(1, 50)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            file.append([instant(50)])
    assert numbers(file.path) == [0]
    file.close()


def test_a_file_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="No such file or directory"):
        file = TraceFile(tmp_path / "gone" / "trace.json")
    file.append([instant(0)])
    file.close()
