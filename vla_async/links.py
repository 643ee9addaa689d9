"""Links between the ranks of one host: how rank 0 finds the others, tells them what to do, and notices when one is lost.

The ranks meet for gradients elsewhere. Over a link, a local socket without a name in the file system, go small messages and
the file descriptors of shared memory. When an end is gone, the other learns so at once, and a rank whose main thread does
not end by itself then is ended by the thread that listens.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from vla_async.shared_memory import SharedBlock

GRACE_S = 3.0  # for a rank that only trains to end by itself when rank 0 has
END_S = 10.0  # for all of them to have ended
CONNECT_S = 60.0  # for importing everything; other launchers start the ranks in any order
_BLOCK = "a block of shared memory"


class RankError(RuntimeError):
    """Another rank failed, ended or did not answer."""


class LeadingLinks:
    """Rank 0's ends.

    Args:
        num_ranks: how many ranks there are, rank 0 included.
        address: of the socket, the same for all ranks.
        timeout_s: how long another rank may take to connect (but at least a minute), and the own main thread to notice that
            one is lost.

    Attributes:
        trouble: what became of the first rank that was lost; None while all is well.
        alarm: called with that, from another thread.
    """

    def __init__(self, num_ranks: int, address: str, timeout_s: float) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.trouble: RankError | None = None
        self.alarm: Callable[[RankError], None] = lambda trouble: None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._left, self._lock = set(range(1, num_ranks)), threading.Lock()
        self._ending, self._heard = threading.Event(), threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(num_ranks)

    def wait_for_all(self, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        """Wait until every other rank has connected.

        Args:
            processes: those of ranks 1, 2, ..., if this process has started them.

        Raises:
            RankError: names those that ended before, or did not come in time.
        """
        self._processes = dict(enumerate(processes, start=1))
        self._socket.settimeout(0.1)
        limit_s = max(self.timeout_s, CONNECT_S)
        deadline = time.monotonic() + limit_s
        while missing := sorted(self._left - self._links.keys()):
            with suppress(TimeoutError):
                self._accept()
            for rank in missing:
                if rank in self._processes and self._processes[rank].poll() is not None and rank not in self._links:
                    raise RankError(f"rank {rank} {self._how(rank)} before it joined; what it printed says why")
            if time.monotonic() > deadline:
                who = " and ".join(map(str, missing))
                raise RankError(f"rank {who} did not join within {limit_s:g} s (see trainer.rank_timeout_s)")
        self._socket.close()
        threading.Thread(target=self._listen, name="rank links", daemon=True).start()

    def _accept(self) -> None:
        accepted, _ = self._socket.accept()
        pid, user = _peer(accepted)
        if user != os.getuid():
            accepted.close()
            return
        accepted.setblocking(True)
        link = Connection(accepted.detach())
        rank = int(link.recv())
        self._links[rank], self._pids[rank] = link, pid

    # ------------------------------------------------------------------ what is said

    def tell(self, *message: Any, rank: int | None = None) -> None:
        """Send a message to one rank, or to all; one that is lost is heard of otherwise."""
        for number in self._links if rank is None else [rank]:
            with self._lock, suppress(OSError):
                self._links[number].send(message)

    def share(self, block: SharedBlock) -> None:
        """Let all ranks map a block of shared memory."""
        for link in self._links.values():
            descriptor, size = block.descriptor()
            with self._lock, suppress(OSError):
                link.send((_BLOCK, block.fields, size))
                send_handle(link, descriptor, None)

    # ------------------------------------------------------------------ what is heard

    def _listen(self) -> None:
        ends = {link: rank for rank, link in self._links.items()}
        while ends:
            for link in wait(list(ends)):
                assert isinstance(link, Connection)
                rank = ends[link]
                try:
                    what, *text = link.recv()
                except (EOFError, OSError):
                    what, text = "lost", [""]
                del ends[link]
                self._left.discard(rank)
                if what != "done" and not self._ending.is_set() and self.trouble is None:
                    self._lose(rank, text[0] if what == "failed" else self._how(rank))
        self._heard.set()

    def _lose(self, rank: int, how: str) -> None:
        self.trouble = RankError(f"rank {rank} (pid {self._pids[rank]}) {how}; the run ends")
        self.alarm(self.trouble)
        threading.Thread(target=self._end_if_it_hangs, daemon=True).start()

    def _end_if_it_hangs(self) -> None:
        if not self._ending.wait(self.timeout_s):
            _leave(f"{self.trouble}, and so does rank 0, which has not noticed for {self.timeout_s:g} s")

    def _how(self, rank: int) -> str:
        """How a rank ended, as far as this process can know."""
        if rank not in self._processes:
            return "ended"
        with suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(END_S)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself (exit code {code})"
        return "closed its link"

    def cause(self) -> RankError | None:
        """What became of a rank that was lost; waits a moment for what it has to say."""
        self._ending.wait(0.0 if self.trouble else 0.5)
        return self.trouble

    # ------------------------------------------------------------------ the end

    def kill(self) -> None:
        """End the ranks that this process has started, at once."""
        for process in self._processes.values():
            process.kill()

    def fail(self, error: BaseException) -> None:
        """This rank's run has failed: the others end too."""
        self._ending.set()
        self.tell("failed", _end(error))

    def close(self) -> None:
        """Wait until all other ranks have ended, a moment only; end those that this process has started and that hang."""
        self._ending.set()
        self._socket.close()
        deadline = time.monotonic() + END_S
        try:
            if self._links:
                self._heard.wait(END_S)
            for rank in self._links.keys() & self._processes.keys():
                with suppress(subprocess.TimeoutExpired):
                    self._processes[rank].wait(max(0.1, deadline - time.monotonic()))
        finally:
            self.kill()
            for process in self._processes.values():
                process.wait()
        for link in self._links.values():
            link.close()


class FollowingLink:
    """The end of another rank.

    Args:
        rank: which.
        address: of rank 0's socket.
        timeout_s: how long rank 0 may take for its next message.

    Raises:
        RankError: if rank 0 is not there.
    """

    def __init__(self, rank: int, address: str, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._link = _connect(address, CONNECT_S)
        self._link.send(rank)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = False
        threading.Thread(target=self._listen, name="rank link", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._link.recv()
                if message[0] == _BLOCK:
                    message = SharedBlock.attach(message[1], recv_handle(self._link), message[2])
            except (EOFError, OSError):
                message = ("failed", "ended")
            if isinstance(message, tuple) and message[0] == "failed":
                break
            self._inbox.put(message)
        error = RankError(f"rank {self.rank} ends, for rank 0 {message[1]}")
        self._inbox.put(error)
        time.sleep(GRACE_S)
        if not self._done:  # the main thread computes, or waits where nobody will come
            _leave(str(error))

    def receive(self, *expected: str) -> Any:
        """The next message, or block of shared memory, from rank 0.

        Raises:
            RankError: if rank 0 fails, ends or says nothing in time.
        """
        try:
            message = self._inbox.get(timeout=self.timeout_s)
        except queue.Empty:
            raise RankError(
                f"rank {self.rank} waited in vain for rank 0, for trainer.rank_timeout_s={self.timeout_s:g} s"
            ) from None
        if isinstance(message, RankError):
            raise message
        if isinstance(message, tuple) and message[0] not in expected:
            raise RankError(f"rank 0 said {message[0]!r} when rank {self.rank} expected {' or '.join(expected)}")
        return message

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this rank ends."""
        with suppress(OSError):
            self._link.send(("failed", _end(error)))

    def close(self) -> None:
        """Tell rank 0 that this rank is through."""
        self._done = True
        with suppress(OSError):
            self._link.send(("done",))


def local_address(port: int) -> str:
    """Where rank 0 of a run listens: in Linux's abstract namespace, which leaves nothing behind.

    Args:
        port: at which the ranks meet, which no other run of this host has.
    """
    return f"\0vla_async/{os.getuid()}/{port}"


def _connect(address: str, timeout_s: float) -> Connection:
    deadline = time.monotonic() + timeout_s
    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(address)
        except OSError as error:
            end.close()
            if time.monotonic() > deadline:
                raise RankError(f"rank 0 was not there within {timeout_s:g} s: {error}") from None
            time.sleep(0.05)
            continue
        _, user = _peer(end)
        if user != os.getuid():
            raise RankError(f"what listens in the place of rank 0 belongs to the user {user}")
        return Connection(end.detach())


def _peer(end: socket.socket) -> tuple[int, int]:
    """The process at the other end of a local socket, and its user."""
    pid, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _end(error: BaseException) -> str:
    """What an error means to the other ranks, after the name of its rank."""
    if isinstance(error, KeyboardInterrupt):
        return f"was interrupted ({error})"
    return f"failed: {type(error).__name__}: {error}"


def _leave(message: str) -> None:
    """End the process now, for its main thread does not."""
    print(f"vla-async: {message}", file=sys.stderr, flush=True)
    os._exit(1)
