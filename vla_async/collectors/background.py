"""Collecting into a replay buffer, also while nobody iterates."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl.collectors import BaseCollector

from vla_async.collectors.fleet import Fleet
from vla_async.collectors.orders import RowCounts


class BackgroundCollector(BaseCollector):
    """A collector over a :class:`Fleet` that can write to a replay buffer from a thread of its own.

    Attributes:
        replay_buffer: where to, or None.
    """

    replay_buffer: Any
    _fleet: Fleet | None
    _counts: RowCounts | None
    _pending: Any

    def __init__(self) -> None:
        super().__init__()
        self.closed = True
        self._ignore_rb = False
        self._lent: list[int] = []
        self._writer: threading.Thread | None = None
        self._writer_error: BaseException | None = None
        self._turn, self._stopping = threading.Condition(), threading.Event()
        self._paused = self._busy = False

    @abstractmethod
    def _ensure_open(self) -> Fleet:
        """The processes; started if they are not running."""

    # ------------------------------------------------------------------ the thread that writes

    def start(self) -> None:
        """Collect into ``replay_buffer`` in the background, until ``total_frames`` or :meth:`async_shutdown`.

        Raises:
            RuntimeError: without a replay buffer, or if it was called before.
        """
        self._raise_writer_error()
        if self.replay_buffer is None:
            raise RuntimeError("start() writes to a replay buffer, but replay_buffer is None")
        if self._writer is not None:
            raise RuntimeError("start() was called before; call async_shutdown() first")
        self._ensure_open()  # so that what cannot start is said here
        self._iteration_started = True
        self._writer = threading.Thread(target=self._write_on, name="vla-async-collector", daemon=True)
        self._writer.start()

    def _write_on(self) -> None:
        try:
            for _ in iter(self):
                pass
        except Exception as error:  # noqa: BLE001 - it is raised by the next call of the thread that started this one
            self._writer_error = error
        finally:
            self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        """Said by the thread that writes: whether it has a batch to write, which it begins only outside of a pause."""
        with self._turn:
            if busy and threading.current_thread() is self._writer:
                self._turn.wait_for(lambda: not self._paused or self._stopping.is_set())
            self._busy = busy and threading.current_thread() is self._writer
            self._turn.notify_all()

    def _raise_writer_error(self) -> None:
        error, self._writer_error = self._writer_error, None
        if error is not None:
            raise RuntimeError("collecting in the background failed") from error

    @contextmanager
    def pause(self, timeout: float | None = 30.0, *, resume: bool = True) -> Iterator[None]:
        """A block in which the replicas answer nothing and nothing is written to the replay buffer.

        Args:
            timeout: not used: a replica finishes at most one batch.
            resume: whether to go on after the block.
        """
        self._raise_writer_error()
        fleet = self._fleet
        if fleet is None:
            yield
            return
        with self._turn:
            self._paused = True
            self._turn.wait_for(lambda: not self._busy)
        try:
            fleet.pause()
            yield
        finally:
            if resume and self._fleet is fleet:
                fleet.resume()
            with self._turn:
                self._paused = self._fleet is fleet and not resume
                self._turn.notify_all()

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    # ------------------------------------------------------------------ end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all processes. Iterating again starts new ones.

        Args:
            timeout: how long processes may take to end by themselves, in seconds.
            close_env: not used: an env ends with its process.
            raise_on_error: raise what :meth:`start` failed with.
        """
        self._stop_fleet(0.7 if timeout is None else timeout)
        self.closed = True
        if raise_on_error:
            self._raise_writer_error()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """A block in which nothing runs; what :meth:`start` had begun goes on after it."""
        goes_on = self._writer is not None
        self._stop_fleet(0.7)
        yield
        if goes_on:
            self.start()

    def _stop_fleet(self, grace_s: float) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is None:
            return
        self._stopping.set()
        self._counts, self._lent = fleet.counts, []
        if fleet.publisher is not None and fleet.publisher.latest is not None:
            self._pending = fleet.publisher.latest  # the envs of the next fleet act with what was published, too
        writer, self._writer = self._writer, None
        if writer is not None and writer is not threading.current_thread():
            with self._turn:
                self._turn.notify_all()
            fleet.interrupt()
            writer.join()
        self._stopping.clear()
        fleet.close(grace_s)

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self._stop_fleet(0.2)
