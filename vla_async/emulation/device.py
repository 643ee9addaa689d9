"""What an emulated device needs: to be held by one forward at a time, for a given time, without using a core."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_thread = threading.local()


def sleep_until(deadline: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches ``deadline``; return at once if it has passed.

    The kernel may let a thread oversleep, by 50 microseconds unless told otherwise, to wake several at once; it is told
    otherwise here, for what is emulated would take that much longer.
    """
    remaining = deadline - time.perf_counter()
    if remaining > 0.0:
        if _libc is not None and not hasattr(_thread, "is_punctual"):
            _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds, of this thread; refused, it sleeps as before
            _thread.is_punctual = True
        time.sleep(remaining)


class DeviceLock:
    """Makes the copies of a policy take turns, in whatever threads and processes they are: one device serves them all.

    The lock is a file's. Copying or pickling it, by any start method, gives another handle on the same device; the
    process that made the first handle removes the file when it exits.

    Args:
        path: the file; by default a new one in the directory for temporary files.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is None:
            handle, path = tempfile.mkstemp(prefix="vla-async-device-")
            os.close(handle)
            atexit.register(_remove, path, os.getpid())
        self.path = os.fspath(path)
        self._handles = threading.local()

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.path, self._handles = path, threading.local()

    def __enter__(self) -> None:
        handle: _Handle | None = getattr(self._handles, "handle", None)
        if handle is None or handle.pid != os.getpid():
            handle = self._handles.handle = _Handle(os.open(self.path, os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(handle.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._handles.handle.file, fcntl.LOCK_UN)


class _Handle:
    """One open file. Threads that shared one, or a forked child and its parent, would hold the lock together."""

    def __init__(self, file: int) -> None:
        self.file, self.pid = file, os.getpid()

    def __del__(self) -> None:
        os.close(self.file)


def _remove(path: str | os.PathLike[str], owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked from it
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
