"""``Timeline``: records who does what in a run, and writes ``timeline.json``.

::

   every process ──records──▶ its Track (shared memory) ──once per step──▶ Timeline, rank 0 ──events──▶ timeline.json
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from vla_async.monitor.timeline import FILE, TRAINER
from vla_async.monitor.timeline_file import TraceFile, event
from vla_async.monitor.timeline_track import LOOKS, Kind, Look, Record, Track, clock
from vla_async.monitor.torch_trace import TorchTrace

if TYPE_CHECKING:
    from vla_async.links import FollowingLink, LeadingLinks

PUBLISHER, REPLICA, WORKER = "publisher", "replica", "env worker"
_GROUPS = {TRAINER: (1, "trainer"), PUBLISHER: (1, "trainer"), REPLICA: (2, "replicas"), WORKER: (3, "env workers")}


class _Lane(NamedTuple):
    """A row of the picture."""

    name: str
    track: Track
    pid: int  # of its group; the processes of the run have others
    tid: int


class _End(NamedTuple):
    """One end of an arrow, by time (nanoseconds since the timeline was opened), and where it is drawn."""

    time: int
    is_taken: bool
    slot: int
    lane: _Lane
    drawn: int


class Timeline:
    """What a run records. Where nothing is wanted, nothing is allocated, and asking costs next to nothing.

    Args:
        setting: ``trainer.timeline``: whether to record all steps, or ``[first, last]``.
        torch_traces: write traces of ``torch.profiler`` for the same time, one of the trainer and one of each replica.
        max_steps: the last step that there will be, if that is known.

    Attributes:
        own: where this process records; None if nothing is wanted.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    def __init__(self, setting: bool | list[int] = False, torch_traces: bool = False, max_steps: int | None = None) -> None:
        if isinstance(setting, list) and (len(setting) != 2 or not 1 <= setting[0] <= setting[1]):
            raise ValueError(
                f"trainer.timeline={setting} must be true, false, or [first, last]: the steps to record, of which the first "
                "is 1 and none comes after the last"
            )
        self._range = setting if isinstance(setting, list) else None
        if self._range and max_steps is not None and self._range[0] > max_steps:
            raise ValueError(
                f"trainer.timeline={setting} would record nothing, for trainer.max_steps={max_steps} comes first; "
                "choose earlier steps, or more of them"
            )
        self._wanted, self._torch_traces = setting is not False, torch_traces
        self.own: Track | None = None
        self._file: TraceFile | None = None
        self._trace: TorchTrace | None = None
        self._forget()

    def _forget(self) -> None:
        self._on, self._arrows, self._lost = False, 0, 0
        self._lanes: list[_Lane] = []
        self._pending: list[str] = []
        self._finished: dict[int, _End] = {}

    # ------------------------------------------------------------------ beginning and end

    def open(self, directory: Path | None) -> None:
        """Begin a run; ``directory`` is its own on rank 0, and None on the others, which rank 0 writes for."""
        if not self._wanted or directory is None:
            return
        self._origin, self._on, self._directory = clock(), self._range is None, directory
        self._file = TraceFile(directory / FILE)
        self.own = self.track(TRAINER, 0)
        if self._torch_traces and (path := self.torch_trace(f"{TRAINER} 0")):
            path.parent.mkdir()
            self._trace = TorchTrace(path)

    def share(self, links: LeadingLinks) -> None:
        """Let the other ranks record: rank 0's part."""
        for rank in range(1, links.num_ranks):
            if (track := self.track(TRAINER, rank)) is not None:
                links.share(track.block)

    def receive(self, link: FollowingLink, num_ranks: int) -> None:
        """Let this rank record: its part, as it is told of all tracks."""
        if self._wanted:
            blocks = [link.receive() for _ in range(1, num_ranks)]
            self.own = Track(blocks[link.rank - 1])

    def track(self, role: str, number: int = 0) -> Track | None:
        """A new lane of the picture, and where the process that it shows records; None if nothing is wanted."""
        if self._file is None:
            return None
        pid, group = _GROUPS[role]
        name = role if role == PUBLISHER else f"{role} {number}"
        lane = _Lane(name, Track(), pid, len(self._lanes) + 1)
        order = list(_GROUPS).index(role) * 100_000 + number
        self._lanes.append(lane)
        self._pending += [
            event("M", "process_name", pid, lane.tid, args={"name": group}),
            event("M", "process_sort_index", pid, lane.tid, args={"sort_index": pid}),
            event("M", "thread_name", pid, lane.tid, args={"name": name}),
            event("M", "thread_sort_index", pid, lane.tid, args={"sort_index": order}),
        ]
        lane.track.is_on = self._on
        return lane.track

    def torch_trace(self, name: str) -> Path | None:
        """The file for torch's profile of a process; None if it is not wanted."""
        return self._directory / "torch" / f"{name.replace(' ', '_')}.json" if self._torch_traces and self._file else None

    def close(self) -> None:
        """Write what is left, and close the file. Harmless if called again."""
        if self._trace is not None:
            self._trace.close()
        if self._file is not None:
            self._write()
            self._file.close()
            if self._lost:
                rank_zero_warn(f"{self._file.path} lacks {self._lost} records, for which there was no room; it says where")
        self.own = self._file = self._trace = None
        self._forget()

    # ------------------------------------------------------------------ what is recorded

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of this rank: the block. Before it, rank 0 decides for all whether they record; after it, it writes."""
        if self.own is None:
            yield
            return
        if self._file is not None:
            self._turn(self._range is None or self._range[0] <= number <= self._range[1])
        started = clock()
        try:
            yield
        finally:
            self.own.add(Kind.STEP, started, clock(), number)
            self._write()

    def _turn(self, on: bool) -> None:
        if on != self._on:
            self._on = on
            for lane in self._lanes:
                lane.track.is_on = on
        if self._trace is not None:
            self._trace.follow(on)

    @contextmanager
    def span(self, kind: Kind, *args: int) -> Iterator[None]:
        """Something that this process does: the block."""
        if self.own is None or not self.own.is_on:
            yield
            return
        started = clock()
        try:
            yield
        finally:
            self.own.add(kind, started, clock(), *args)

    @contextmanager
    def reading(self, slots: list[int]) -> Iterator[None]:
        """This process reads trajectories out of slots: the block."""
        started = clock()
        yield
        if self.own is not None:
            now = clock()
            self.own.add(Kind.READ, started, now, len(slots))
            for slot in slots:
                self.own.add(Kind.TAKEN, started, now, slot)

    @property
    def is_on(self) -> bool:
        """Whether something is recorded now."""
        return self._on

    def count(self, name: str, **values: float) -> None:
        """Numbers as they are now, drawn as a curve each."""
        if self._on:
            ts = round((clock() - self._origin) * 1e6, 3)
            self._pending.append(event("C", name, _GROUPS[TRAINER][0], 0, ts=ts, args=values))

    # ------------------------------------------------------------------ what is written

    def _write(self) -> None:
        """Write what all processes have recorded since it was called last."""
        if self._file is None:
            return
        events, self._pending = self._pending, []
        ends: list[_End] = []
        for lane in self._lanes:
            for record in lane.track.drain(self._origin):
                if record.kind in (Kind.FINISHED, Kind.TAKEN):
                    ends.append(_end(lane, record))
                else:
                    events.append(_slice(lane, record))
            if lost := lane.track.newly_lost():
                self._lost += lost
                ts = round((clock() - self._origin) * 1e6, 3)
                events.append(event("i", f"{lost} records lost", lane.pid, lane.tid, ts=ts, s="t", args={"lost": lost}))
        self._file.append(events + self._draw(ends))

    def _draw(self, ends: list[_End]) -> list[str]:
        """Arrows from where trajectories were finished to where they were taken.

        What was finished in a slot before it was taken is what was taken: nobody writes there in between.
        """
        arrows = []
        for end in sorted(ends, key=lambda end: (end.time, end.is_taken)):
            if not end.is_taken:
                self._finished[end.slot] = end
            elif (begun := self._finished.pop(end.slot, None)) is not None:
                self._arrows += 1
                for phase, at in (("s", begun), ("f", end)):
                    more = {"ts": at.drawn / 1000, "id": self._arrows, "cat": "trajectory"} | (
                        {"bp": "e"} if phase == "f" else {}
                    )
                    arrows.append(event(phase, "trajectory", at.lane.pid, at.lane.tid, **more))
        return arrows


def _end(lane: _Lane, record: Record) -> _End:
    """Where an arrow begins, just before its slice ends, or where one ends, in the middle of its slice."""
    half = (record.end - record.start) // 2
    is_taken = record.kind == Kind.TAKEN
    return _End(record.end, is_taken, record.args[0], lane, record.end - (half if is_taken else min(1000, half)))


def _slice(lane: _Lane, record: Record) -> str:
    """The JSON of a slice. By hand, for there are many of them."""
    start, took, args = record.start, record.end - record.start, record.args[: len(LOOKS[record.kind].args)]
    times = (start // 1000, start % 1000, took // 1000, took % 1000)
    text = _SLICES[record.kind] % (lane.pid, lane.tid, *times, *args)
    return text.replace('"step"', f'"step {args[0]}"', 1) if record.kind == Kind.STEP else text


def _template(look: Look) -> str:
    args = ",".join(f'"{name}":%d' for name in look.args)
    return f'{{"ph":"X","name":"{look.name}","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,"args":{{{args}}}}}'


_SLICES = {kind: _template(look) for kind, look in LOOKS.items()}
