"""Ctrl-C and SIGTERM that never tear an optimizer step apart."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
        heed_s: seconds that the main thread has to hear of a signal.

    Attributes:
        unheeded: called, from another thread, when it has not: it waits outside of Python for what may never come, and this
            has to end the wait. None for nothing to do.
    """

    def __init__(self, same_s: float = 3.0, heed_s: float = 5.0) -> None:
        self.same_s, self.heed_s = same_s, heed_s
        self.unheeded: Callable[[], None] | None = None
        self._watch: _Watch | None = None
        self._depth, self._raised_at = 0, -math.inf
        self._pending = ""  # the name of the signal that is held back
        self._wait_ended_by = ""  # the name of the signal for which a wait was ended
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._watch is not None:
            self._watch.hear()
        if self._depth:
            self._pending = name
        elif time.monotonic() - self._raised_at > self.same_s:
            self._raise(name)

    def _raise(self, name: str) -> NoReturn:
        self._pending, self._wait_ended_by, self._raised_at = "", "", time.monotonic()
        raise KeyboardInterrupt(name)

    def _end_wait(self, name: str) -> None:
        self._wait_ended_by = name
        if self.unheeded is not None:
            self.unheeded()

    def cause(self) -> KeyboardInterrupt | None:
        """The interrupt that had a wait ended, if the error which the wait then raised came before it."""
        name, self._wait_ended_by = self._wait_ended_by, ""
        return KeyboardInterrupt(name) if name else None

    def __enter__(self) -> Interrupts:
        self._pending, self._wait_ended_by, self._raised_at = "", "", -math.inf
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
            if self.unheeded is not None:
                self._watch = _Watch(self.same_s, self.heed_s, self._end_wait)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
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


class _Watch:
    """A thread that learns of every signal at once, and looks whether the main thread does. Made in the main thread.

    Args:
        same_s: a signal so soon after one that was heard of counts as heard of: Python may call a handler once for both.
        heed_s: seconds that the main thread has.
        unheeded: called with the signal's name when they are over.
    """

    def __init__(self, same_s: float, heed_s: float, unheeded: Callable[[str], None]) -> None:
        self._same_s, self._heed_s, self._unheeded = same_s, heed_s, unheeded
        self._heard, self._heard_at, self._closed = threading.Event(), -math.inf, False
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def hear(self) -> None:
        """Note that the main thread handles a signal."""
        self._heard_at = time.monotonic()
        self._heard.set()

    def _listen(self) -> None:
        while numbers := self._ears.recv(64):
            self._heard.clear()
            ours = [number for number in numbers if number in (signal.SIGINT, signal.SIGTERM)]
            if not ours or time.monotonic() - self._heard_at < self._same_s:
                continue
            if not self._heard.wait(self._heed_s) and not self._closed:
                self._unheeded(signal.Signals(ours[0]).name)

    def close(self) -> None:
        """Leave the signals to who had them before."""
        self._closed = True
        signal.set_wakeup_fd(self._previous)
        self._heard.set()
        self._mouth.close()
        self._thread.join()
        self._ears.close()
