"""What Chrome's Trace Event format asks of a file, so that Perfetto and chrome://tracing show what is meant.

After "Trace Event Format" of the Chromium project: the fields of each phase, how slices nest, how flows bind to slices.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Lane = tuple[int, int]
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def check_trace(path: Path) -> list[Event]:
    """The events of a file, which must keep all rules."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = content["traceEvents"]
    for event in events:
        _check_fields(event)
    names = _lane_names(events)
    slices: dict[Lane, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "Xsfi":
            assert (event["pid"], event["tid"]) in names, f"{event} is in a lane without a name"
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((nanoseconds(event["ts"]), nanoseconds(event["ts"] + event["dur"])))
    for lane, found in slices.items():
        _check_nesting(names[lane], found)
    _check_flows(events, slices)
    return events


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _check_fields(event: Event) -> None:
    assert event["ph"] in ("M", "X", "s", "f", "C", "i"), event
    assert isinstance(event["name"], str), event
    assert isinstance(event["pid"], int), event
    assert isinstance(event["tid"], int), event
    if event["ph"] == "M":
        key, kind = _METADATA[event["name"]]
        assert isinstance(event["args"][key], kind), event
        return
    assert event["ts"] >= 0, event
    if event["ph"] == "X":
        assert event["dur"] >= 0, event
        assert isinstance(event["args"], dict), event
    if event["ph"] in "sf":
        assert {"id", "cat"} <= event.keys(), event
    if event["ph"] == "C":
        assert event["args"], event
        assert all(isinstance(value, (int, float)) for value in event["args"].values()), event
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event


def _lane_names(events: list[Event]) -> dict[Lane, str]:
    """The lanes' names, each told once, before anything is drawn in the lane."""
    names: dict[Lane, str] = {}
    for event in events:
        lane = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert lane not in names, f"lane {lane} has two names"
            names[lane] = event["args"]["name"]
        elif event["ph"] in "Xsfi":
            assert lane in names, event
    assert len(set(names.values())) == len(names)
    groups = {event["pid"] for event in events if event["name"] == "process_name"}
    assert groups >= {pid for pid, _ in names}
    return names


def _check_nesting(name: str, slices: list[tuple[int, int]]) -> None:
    """Of two slices of a lane one holds the other, or they have no time in common."""
    around: list[int] = []
    for start, end in sorted(slices, key=lambda slice: (slice[0], -slice[1])):
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], f"a slice of {name} from {start} to {end} ns overlaps the end of another"
        around.append(end)


def _check_flows(events: list[Event], slices: dict[Lane, list[tuple[int, int]]]) -> None:
    """Every arrow has one beginning and one later end, each inside a slice of its lane."""
    ends: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]].append(event)
            at = nanoseconds(event["ts"])
            assert any(start <= at <= end for start, end in slices[event["pid"], event["tid"]]), f"{event} is in no slice"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[1]["bp"] == "e"
        assert pair[0]["ts"] <= pair[1]["ts"]
        assert pair[0]["name"] == pair[1]["name"]
