"""Ctrl-C and SIGTERM that never tear an optimizer step apart."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


class Interrupts:
    """While open, SIGINT and SIGTERM raise ``KeyboardInterrupt``, but not inside a :meth:`critical` section.

    A second one within ``same_s`` seconds counts as the same (an impatient key, a scheduler that sends both signals): it
    would tear the clean-up apart that the first has started. Outside the main thread, where Python allows no handlers,
    nothing changes.

    Args:
        same_s: seconds after an interrupt in which no other is raised.
    """

    def __init__(self, same_s: float = 3.0) -> None:
        self.same_s = same_s
        self._depth, self._raised_at = 0, -math.inf
        self._pending = ""  # the name of the signal that is held back
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._depth:
            self._pending = name
        elif time.monotonic() - self._raised_at > self.same_s:
            self._raise(name)

    def _raise(self, name: str) -> NoReturn:
        self._pending, self._raised_at = "", time.monotonic()
        raise KeyboardInterrupt(name)

    def __enter__(self) -> Interrupts:
        self._pending, self._raised_at = "", -math.inf
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        self._previous = {}

    @contextmanager
    def critical(self) -> Iterator[None]:
        """Hold an interrupt back until the block is left."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            self._raise(self._pending)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Ignore interrupts inside the block: for the clean-up that an interrupt itself has started."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._pending = ""
