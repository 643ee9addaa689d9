"""``Supervisor``: a thread that notices when a worker or a replica raises, dies or hangs, and does what has to be done.

It sleeps in the kernel until something happens, and looks at the clock only when the earliest time-out is due.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from vla_async.collectors.board import Board
from vla_async.collectors.pool import LONGEST_WAIT_S, WorkerError, how_it_ended
from vla_async.collectors.processes import Member
from vla_async.collectors.wires import clock
from vla_async.collectors.worker import Reply


class Supervisor:
    """Watches the processes of a rollout.

    Args:
        workers: the env workers, by number.
        replicas: the replicas, by number.
        board: shared bookkeeping.
        env_timeout_s: how long a worker may stay in an env.
        start_timeout_s: how long a worker may take to build its envs.
        max_restarts: how often each worker may be replaced.
        restart: replaces a worker that has ended, given its number, and returns the new one.
        welcome: called with a worker's number when it is ready again.
        alarm: wakes whoever waits, for there is an error.
    """

    def __init__(
        self,
        workers: list[Member],
        replicas: list[Member],
        board: Board,
        *,
        env_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        restart: Callable[[int], Member],
        welcome: Callable[[int], None],
        alarm: Callable[[], None],
    ) -> None:
        self.workers, self.replicas, self.board = workers, replicas, board
        self.env_timeout_s, self.start_timeout_s, self.max_restarts = env_timeout_s, start_timeout_s, max_restarts
        self._restart, self._welcome, self._alarm = restart, welcome, alarm
        self.restarts = 0
        self.error: BaseException | None = None
        self._hung: dict[int, str] = {}
        self._bell, self._ring = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="vla-async-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the processes are left as they are."""
        self._ring.send(None)
        self._thread.join()
        self._bell.close()
        self._ring.close()

    def check(self) -> None:
        """Raise what a process of the rollout has failed with, if one has.

        Raises:
            WorkerError: with the process's own traceback.
        """
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while self.error is None and self._watch():
                pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer has to learn of it rather than wait for ever
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._alarm()

    def _watch(self) -> bool:
        """Wait for something to happen and see to it; False once told to stop."""
        links: dict[Any, tuple[Member, int | None]] = {}
        for place, worker in enumerate(self.workers):
            links[worker.link] = links[worker.process.sentinel] = (worker, place)
        for replica in self.replicas:
            links[replica.link] = links[replica.process.sentinel] = (replica, None)
        happened = connection.wait([self._bell, *links], self._patience())
        if self._bell in happened:
            return False
        ended: dict[str, tuple[Member, int | None]] = {}
        for source in happened:
            member, number = links[source]
            if source is member.link:
                self._listen(member, number)
            if not member.process.is_alive() or member.trouble:
                ended[member.name] = (member, number)
        for dead, number in ended.values():
            self._bury(dead, number)
        if self.error is None:
            self._kill_hung()
        return True

    def _listen(self, member: Member, number: int | None) -> None:
        try:
            message = member.link.recv()
        except (EOFError, ConnectionResetError):
            member.process.join(1.0)
            return
        if isinstance(message, Reply):
            member.trouble = message.error or ""
        elif number is not None:
            member.started = None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended meanwhile, as we shall see
                self._welcome(number)

    def _bury(self, member: Member, number: int | None) -> None:
        """See to a process that has ended: replace it, or end the run."""
        member.process.join(2.0)
        if member.trouble:
            reason = f"{member.name} failed with\n{member.trouble}"
        else:
            hung = self._hung.pop(number, None) if number is not None else None
            reason = hung or f"{member.name} (pid {member.process.pid}) {how_it_ended(member.process)}"
        if number is None:
            self._fail(WorkerError(reason))
        elif member.generation >= self.max_restarts:
            more = f" (after {self.max_restarts} restarts; max_restarts sets how many)" if self.max_restarts else ""
            self._fail(WorkerError(reason + more))
        else:
            self.board.busy_since[number] = 0.0
            member.link.close()
            self.restarts += 1
            self.workers[number] = self._restart(number)

    def _deadlines(self) -> dict[int, tuple[float, str]]:
        """When each worker that is at work has taken too long, and for what."""
        deadlines = {}
        for number, worker in enumerate(self.workers):
            since = float(self.board.busy_since[number])
            if worker.started is not None:
                deadlines[number] = (
                    worker.started + self.start_timeout_s,
                    f"to build its envs within {self.start_timeout_s:g} s",
                )
            elif since:
                deadlines[number] = (
                    since + self.env_timeout_s,
                    f"to step its env within env_timeout_s={self.env_timeout_s:g} s",
                )
        return deadlines

    def _patience(self) -> float:
        """Seconds until the next time-out can be due; a worker that goes into its env later has longer."""
        now, longest = clock(), min(self.env_timeout_s, self.start_timeout_s, LONGEST_WAIT_S)
        first = min((deadline for deadline, _ in self._deadlines().values()), default=now + longest)
        return max(0.01, min(first - now, longest))

    def _kill_hung(self) -> None:
        now = clock()
        for number, (deadline, task) in self._deadlines().items():
            worker = self.workers[number]
            if now >= deadline and number not in self._hung and worker.process.pid is not None:
                self._hung[number] = f"{worker.name} (pid {worker.process.pid}) did not manage {task}"
                worker.process.kill()
