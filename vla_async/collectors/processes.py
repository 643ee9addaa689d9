"""The processes of a fleet: how they are started, heard and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from vla_async.collectors.pool import WorkerError, first_answers, how_it_ended
from vla_async.collectors.wires import clock
from vla_async.collectors.worker import Reply

T = TypeVar("T")


@dataclass
class Member:
    """A process of the rollout.

    Attributes:
        name: for messages.
        process: the process.
        link: what it reports on.
        trouble: the traceback that it has sent.
        generation: how many processes have had its place before.
        started: when it was started, until it has said that it is ready; then None.
    """

    name: str
    process: BaseProcess
    link: Connection
    trouble: str = ""
    generation: int = 0
    started: float | None = field(default_factory=clock)


def start_member(context: Any, name: str, target: Any, *arguments: Any, daemon: bool = True) -> Member:
    """Start a process whose first argument is its link. One that starts others itself must not be a daemon."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), name=name.replace(" ", "-"), daemon=daemon)
    process.start()
    theirs.close()
    return Member(name, process, ours)


def gather(kind: type[T], members: Sequence[Member], timeout_s: float) -> list[T]:
    """The first message of each of the members, in their order.

    Raises:
        WorkerError: if one fails, ends or says nothing in time.
    """
    waiting: dict[Any, int] = {member.link: number for number, member in enumerate(members)}
    received: dict[int, T] = {}
    deadline = clock() + timeout_s
    while waiting:
        answered = first_answers(list(waiting), deadline)
        if not answered:
            names = ", ".join(members[number].name for number in waiting.values())
            raise WorkerError(f"no answer within start_timeout_s={timeout_s:g} s from {names}")
        for link in answered:
            number = waiting.pop(link)
            received[number] = _receive(kind, members[number], link)
            members[number].started = None
    return [received[number] for number in range(len(members))]


def _receive(kind: type[T], member: Member, link: Connection) -> T:
    try:
        message = link.recv()
    except (EOFError, ConnectionResetError):
        how = how_it_ended(member.process, starting=True)
        raise WorkerError(f"{member.name} (pid {member.process.pid}) {how}") from None
    if isinstance(message, Reply):
        raise WorkerError(f"{member.name} failed with\n{message.error}")
    assert isinstance(message, kind)
    return message


def end_members(workers: list[Member], replicas: list[Member], grace_s: float) -> None:
    """Wait for processes that have been told to end, and kill those that take longer than ``grace_s`` seconds."""
    deadline = clock() + grace_s
    for members in (workers, replicas):
        while members:
            member = members.pop()
            member.process.join(max(0.0, deadline - clock()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.process.close()
            member.link.close()
