"""Ctrl-C and SIGTERM that never tear an optimizer step apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While open, SIGINT and SIGTERM raise ``KeyboardInterrupt``, but not inside a :meth:`critical` section.

    Outside the main thread, where Python allows no handlers, it changes nothing.
    """

    def __init__(self) -> None:
        self._depth, self._pending = 0, False
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending = True
        else:
            raise KeyboardInterrupt(signal.Signals(number).name)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
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
            self._pending = False
            raise KeyboardInterrupt

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Ignore interrupts inside the block: for the clean-up that an interrupt itself has started."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._pending = False
