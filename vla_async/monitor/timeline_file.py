"""``TraceFile``: a file in Chrome's Trace Event format, which Perfetto and chrome://tracing open.

It is whole after every append, for what closes the list is written over by the next events: so whatever ends the process,
the file can be opened, and no more than the new events are ever in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

_HEAD, _FOOT = b'{"displayTimeUnit": "ms",\n"traceEvents": [\n', b"\n]}\n"


class TraceFile:
    """Once the disk has refused events, there is a warning, and no further ones are written.

    Args:
        path: file to write.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        self._file: IO[bytes] | None = None
        with self._giving_up():
            self._file = path.open("wb", buffering=0)
            self._write(0, _HEAD + _FOOT)
            self._end = len(_HEAD)

    def append(self, events: Sequence[str]) -> None:
        """Write events, each the JSON of one."""
        if self._file is None or not events:
            return
        with self._giving_up():
            lines = ",\n".join(events).encode()
            separator = b"" if self._end == len(_HEAD) else b",\n"
            self._write(self._end, separator + lines + _FOOT)
            self._end += len(separator) + len(lines)

    def _write(self, place: int, content: bytes) -> None:
        assert self._file is not None
        self._file.seek(place)
        rest = memoryview(content)
        while rest:  # a disk that is nearly full takes a part
            rest = rest[self._file.write(rest) :]
        self._file.truncate()  # whatever an append that was interrupted has left

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """If the disk refuses what is written inside the block, leave the file as it was before, and close it."""
        try:
            yield
        except OSError as error:
            rank_zero_warn(f"no more events in {self.path}, and the run goes on without: {error.strerror or error}")
            with contextlib.suppress(OSError):
                if self._file is not None and self._end:
                    self._file.truncate(self._end)
                    self._write(self._end, _FOOT)
                else:
                    self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Close the file. Harmless if called again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def event(phase: str, name: str, pid: int, tid: int, **fields: Any) -> str:
    """The JSON of an event; for those that are rare."""
    return json.dumps({"ph": phase, "name": name, "pid": pid, "tid": tid, **fields})
