"""What a run's ``timeline.json`` says: who did what, when. :mod:`vla_async.monitor.timeline_run` writes it."""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "timeline.json"  # in the run directory
TRAINER = "trainer rank"  # what the lanes of trainer ranks begin with
_STEP = "step"  # the argument by which the slice of a step tells its number


@dataclass(frozen=True)
class Slice:
    """Something that took time.

    Attributes:
        lane: who did it: ``env worker 3``, ``replica 0``, ``trainer rank 0``, ``publisher``.
        name: what it was, for example ``forward``; ``step 12`` for a whole step of a trainer rank.
        start_s: when it began, in seconds since the run opened its timeline.
        end_s: when it was over.
        step: the update during which it began, as trainer rank 0 has it; None before the first, after the last, and where
            no step was recorded.
        args: what else is known of it, such as ``rows`` or ``version``.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    step: int | None
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def read_timeline(path: Path) -> list[Slice]:
    """The slices of a timeline, lane by lane, each lane by time; of two that begin together the longer one comes first.

    Args:
        path: a ``timeline.json``.

    Raises:
        ValueError: if it is none.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        found = [event for event in events if event["ph"] == "X"]
        names = [lanes[event["pid"], event["tid"]] for event in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no timeline that a run has written: {error!r}; move it away to go on without"
        ) from error
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"][_STEP])
        for event, lane in zip(found, names, strict=True)
        if lane == f"{TRAINER} 0" and _STEP in event["args"]
    )
    slices = [
        Slice(
            lane, event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, _during(steps, event), event["args"]
        )
        for event, lane in zip(found, names, strict=True)
    ]
    order = {name: place for place, name in enumerate(dict.fromkeys(lanes.values()))}
    return sorted(slices, key=lambda slice: (order[slice.lane], slice.start_s, -slice.end_s))


def _during(steps: list[tuple[float, float, int]], event: dict[str, Any]) -> int | None:
    """The step in which an event began."""
    last = bisect.bisect_right(steps, event["ts"], key=lambda step: step[0]) - 1
    return steps[last][2] if last >= 0 and event["ts"] < steps[last][1] else None
