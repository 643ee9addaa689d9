"""Collecting into a replay buffer, also while nobody iterates."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector

from vla_async.collectors.fleet import Fleet


class BackgroundCollector(BaseCollector):
    """A collector over a :class:`Fleet` that can write to a replay buffer from a thread of its own.

    Attributes:
        replay_buffer: where to, or None.
    """

    replay_buffer: Any
    _fleet: Fleet | None

    def __init__(self) -> None:
        super().__init__()
        self._ignore_rb = False
        self._writer: threading.Thread | None = None
        self._writer_error: BaseException | None = None
        self._writing, self._stopping = threading.Lock(), threading.Event()

    @abstractmethod
    def _ensure_open(self) -> None:
        """Start the processes if they are not running."""

    def _write(self, batch: TensorDictBase) -> None:
        dims = getattr(getattr(self.replay_buffer, "_storage", None), "ndim", 1)
        self.replay_buffer.extend(batch.reshape(-1) if dims == 1 else batch)

    def start(self) -> None:
        """Collect into ``replay_buffer`` in the background, until ``total_frames`` or :meth:`async_shutdown`.

        Raises:
            RuntimeError: without a replay buffer, or if it was called before.
        """
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

    @contextmanager
    def pause(self, timeout: float | None = 30.0, *, resume: bool = True) -> Iterator[None]:
        """A block in which the replicas answer nothing and nothing is written to the replay buffer.

        Args:
            timeout: not used: a replica finishes at most one batch.
            resume: whether to go on after the block.
        """
        if self._fleet is None:
            yield
            return
        with self._writing:
            self._fleet.pause()
            try:
                yield
            finally:
                if resume:
                    self._fleet.resume()

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)
