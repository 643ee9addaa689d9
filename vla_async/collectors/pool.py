"""``EnvPool``: the envs of a factory in processes of their own, stepped together through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.multiprocessing as mp
from torch import Tensor

from vla_async.collectors.worker import Ready, Reply, Rows, run_worker
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.monitor.timeline_track import Kind, Track

if TYPE_CHECKING:
    from vla_async.envs.controllers import ScriptedController

T = TypeVar("T")
LONGEST_WAIT_S = 3600.0  # at once; the kernel takes no longer ones, and whoever has waited so long can wait again

_CAUSES = {
    int(signal.SIGKILL): ", as the kernel does when memory runs out",
    int(signal.SIGBUS): ", as happens when the shared memory in /dev/shm is full",
}


class WorkerError(RuntimeError):
    """An env worker raised, died or did not answer; the message carries its own traceback where there is one."""


@dataclass
class _Link:
    process: BaseProcess
    connection: Connection
    rows: slice
    name: str


def worker_context() -> Any:
    """Workers come from a server process that has imported torch once: quick to start, and safe beside CUDA."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["vla_async.collectors.preload"])
    return context


def warm_up() -> None:
    """Start the server process that workers come from, without waiting for its imports."""
    worker_context()
    forkserver.ensure_running()


def server_address() -> str:
    """Where the server process of this process listens; for :func:`use_server` in a process that it has forked."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    address: str = server._forkserver_address
    return address


def use_server(address: str) -> None:
    """Let the workers of this process come from a server that runs already: one of its own would import everything again."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None  # multiprocessing only knows of servers that the process itself has started


class EnvPool:
    """N envs in worker processes, with one row of shared memory each. Use it as a context manager, or call ``close``.

    An error, or an interrupt, in the middle of a command leaves the envs in an unknown state: the pool then refuses
    further commands and can only be closed.

    Args:
        factory: what to build. Env ``i`` of the pool is ``factory.make(indices[i])``.
        indices: which envs of the factory; all of them by default. Ignored by a batched factory.
        render: the positions in the pool whose env must be able to make pictures.
        controller: a scripted controller that acts in the workers instead of the chunk that is passed in.
        timeout_s: how long a worker may take to build its env or to answer.

    Attributes:
        busy_s: seconds from commands to their answers, summed over the workers.
        tracks: one per worker, where its commands are recorded; none unless somebody puts them here.

    Raises:
        WorkerError: if a worker cannot build its env.
    """

    def __init__(
        self,
        factory: EnvFactory,
        *,
        indices: Sequence[int] | None = None,
        render: Sequence[int] = (),
        controller: ScriptedController | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.timeout_s, self.busy_s = timeout_s, 0.0
        self.tracks: list[Track] = []
        self._answered: dict[int, float] = {}  # when each worker last did
        self._links: list[_Link] = []
        self._state = "starting"
        # a pool that nobody closed ends its workers when it is forgotten, or before Python would wait for them at exit
        Finalize(self, _end_workers, args=(self._links, 0.5), exitpriority=0)
        chosen = [0] if factory.is_batched else list(range(factory.num_envs) if indices is None else indices)
        context = worker_context()
        try:
            for position, index in enumerate(chosen):
                ours, theirs = context.Pipe()
                arguments = (theirs, factory, index, position in render, controller)
                process = context.Process(target=run_worker, args=arguments, name=f"env-worker-{index}", daemon=True)
                process.start()
                theirs.close()
                self._links.append(_Link(process, ours, slice(0, 0), f"env worker {index}"))
            self._share(self._gather(Ready, range(len(chosen))))
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _share(self, ready: dict[int, Ready]) -> None:
        """Allocate the rows and hand each worker its part."""
        self.spec: EnvSpec = ready[0].spec
        start = 0
        for position, link in enumerate(self._links):
            if ready[position].spec != self.spec:
                raise WorkerError(f"{link.name} has {ready[position].spec}, but {self._links[0].name} has {self.spec}")
            link.rows = slice(start, start + ready[position].num_rows)
            start = link.rows.stop
        self.num_envs = start
        self.rows = Rows.allocate(start, self.spec)
        self.instructions, self.tasks = [""] * start, [""] * start
        self._record = torch.zeros(start, dtype=torch.bool)
        for link in self._links:
            link.connection.send(self.rows.part(link.rows))
        self._state = "ready"

    def reset(self, mask: Tensor, seeds: Tensor, record: Tensor | None = None) -> None:
        """Start an episode in the envs of ``mask``; ``rows.observation`` then holds what they see.

        Args:
            mask: bool ``[N]``.
            seeds: int64 ``[N]``.
            record: bool ``[N]``, the envs of ``mask`` that take pictures until their next explicit reset; none by default.
                Of a batch of envs only the first can.
        """
        self.rows.active.copy_(mask)
        self.rows.seeds.copy_(seeds)
        self._record = torch.where(mask, False if record is None else record, self._record)
        self._command(Kind.RESET, lambda link: ("reset", bool(self._record[link.rows.start])))

    def step(self, chunk: Tensor, active: Tensor | None = None, next_seeds: Tensor | None = None) -> dict[int, list[Tensor]]:
        """Execute one decision of every active env. What happened stands in ``rows``.

        Args:
            chunk: float32 ``[N, H, A]``.
            active: bool ``[N]``; all by default.
            next_seeds: int64 ``[N]``. If given, an env whose episode ends starts the next one from its seed at once.

        Returns:
            Pictures by env, for those that record.
        """
        self.rows.chunk.copy_(chunk)
        self.rows.active.copy_(torch.ones_like(self.rows.active) if active is None else active)
        self.rows.reset_after.fill_(next_seeds is not None)
        if next_seeds is not None:
            self.rows.seeds.copy_(next_seeds)
        replies = self._command(Kind.ENV_STEPS, lambda link: ("step",))
        pictured = {self._links[position].rows.start: reply.frames for position, reply in replies.items() if reply.frames}
        return {row: [torch.from_numpy(frame) for frame in frames] for row, frames in pictured.items()}

    def _command(self, kind: Kind, message: Callable[[_Link], tuple[Any, ...]]) -> dict[int, Reply]:
        """Send a command to the workers with an active env, wait for all of them, and note the episodes they started."""
        if self._state != "ready":
            raise WorkerError(f"this pool is {self._state}; make a new one")
        self._state = "out of step with its workers, because an earlier command was cut short"
        active = self.rows.active.tolist()
        called, began = [position for position, link in enumerate(self._links) if any(active[link.rows])], time.monotonic()
        for position in called:
            link = self._links[position]
            try:
                link.connection.send(message(link))
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost(link) from None
        replies = self._gather(Reply, called)
        for position, reply in replies.items():
            for row, (instruction, task) in reply.episodes.items():
                self.instructions[self._links[position].rows.start + row] = instruction
                self.tasks[self._links[position].rows.start + row] = task
            if self.tracks and self.tracks[position].is_on:
                rows = self._links[position].rows
                steps = int(self.rows.executed[rows].sum()) if kind == Kind.ENV_STEPS else 0
                where = (rows.start, rows.stop - rows.start, steps)
                self.tracks[position].add(kind, began, self._answered[position], *where)
        self._state = "ready"
        return replies

    def _gather(self, kind: type[T], positions: Sequence[int]) -> dict[int, T]:
        """One message from each of the workers at ``positions``, in their order."""
        waiting = {self._links[position].connection: position for position in positions}
        received: dict[int, T] = {}
        started = time.monotonic()
        deadline = started + self.timeout_s
        while waiting:
            answered = first_answers(list(waiting), deadline)
            if not answered:
                names = ", ".join(self._links[position].name for position in waiting.values())
                setting = "fit_loop.env_timeout_s, evaluate_loop.timeout_s or collect_loop.env_timeout_s"
                fix = f"if the env is that slow, raise {setting}, whichever was at work"
                raise WorkerError(f"no answer within {self.timeout_s:g} s from {names}; {fix}")
            for connection in answered:
                position = waiting.pop(connection)
                link = self._links[position]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise self._lost(link) from None
                if isinstance(message, Reply) and message.error is not None:
                    raise WorkerError(f"{link.name} failed with\n{message.error}")
                assert isinstance(message, kind)
                received[position] = message
                self._answered[position] = now = time.monotonic()
                self.busy_s += now - started
        return dict(sorted(received.items()))

    def _lost(self, link: _Link) -> WorkerError:
        how = how_it_ended(link.process, starting=self._state == "starting")
        return WorkerError(f"{link.name} (pid {link.process.pid}) {how}")

    @property
    def pids(self) -> list[int]:
        """The processes of the workers."""
        return [link.process.pid or 0 for link in self._links]

    def close(self, grace_s: float = 2.0) -> None:
        """End all workers: ask, then after ``grace_s`` seconds kill. Harmless if called again."""
        self._state = "closed"
        _end_workers(self._links, grace_s)

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(grace_s=0.5 if error is not None else 2.0)


def first_answers(links: Sequence[Connection], deadline: float) -> list[Connection]:
    """Wait for links that have something to say; none of them if ``deadline`` (``time.monotonic``) comes first."""
    while True:
        left = deadline - time.monotonic()
        answered = multiprocessing.connection.wait(links, min(max(0.0, left), LONGEST_WAIT_S))
        if answered or left <= 0.0:
            return cast(list[Connection], answered)


def how_it_ended(process: BaseProcess, starting: bool = False) -> str:
    """What became of a process that has ended, as the end of a sentence about it."""
    process.join(1.0)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}{_CAUSES.get(-code, '')}"
    how = f"ended by itself (exit code {code}); what it printed says more"
    return how + "; a script that starts envs must do so under `if __name__ == '__main__':`" if starting else how


def _end_workers(links: list[_Link], grace_s: float) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # it has ended already
            link.connection.send(None)
    deadline = time.monotonic() + grace_s
    while links:
        link = links[-1]
        link.process.join(max(0.0, deadline - time.monotonic()))
        if link.process.is_alive():
            link.process.kill()
            link.process.join()
        links.pop()
        link.process.close()
        link.connection.close()
