"""Start a process by the fork server, and hear from it. Run as a program, it ends without an error if that works."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection


def _answer(link: Connection) -> None:
    link.send(os.getpid())


def main() -> None:
    """Start one, and wait for its answer."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    pid = ours.recv()
    process.join()
    assert pid == process.pid


if __name__ == "__main__":
    main()
