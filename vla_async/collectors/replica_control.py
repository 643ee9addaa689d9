"""``ReplicaControl``: what is said to all replicas at once, and what they say to it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import wait

from vla_async.collectors.wires import ALARM, PAUSED, Ask, Wires, clock


class ReplicaControl:
    """Announces weights, pauses, resumes and stops the replicas.

    Args:
        wires: the channels.

    Attributes:
        check: raises what a process of the rollout has failed with, if one has.
    """

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.check: Callable[[], None] = lambda: None

    def announce(self) -> None:
        """Tell that there are newer weights."""
        self._tell(Ask.WEIGHTS)

    def acks(self) -> list[tuple[int, int, int]]:
        """Wait for replicas that acknowledge something: ``(replica, version, checksum)`` of each.

        Raises:
            Exception: what a process of the rollout has failed with.
        """
        self.check()  # the alarm rings once, not for everyone who comes
        wait([self._wires.acks.reader])
        records = self._wires.acks.receive()
        if any(replica == ALARM for replica, _, _ in records):
            self.check()
        return [(replica, version, total) for replica, version, total in records if replica != ALARM]

    def pause(self) -> None:
        """Let all replicas stop answering; returns when they have. Envs finish their step and then wait."""
        self._tell(Ask.PAUSE)
        left = set(range(len(self._wires.asks)))
        while left:
            left -= {replica for replica, _, total in self.acks() if total == PAUSED}

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._tell(Ask.RESUME)

    def stop(self) -> None:
        """Tell them to end."""
        self._tell(Ask.STOP)

    def _tell(self, what: Ask) -> None:
        for channel in self._wires.asks:
            channel.send(what, 0, 0, clock())
