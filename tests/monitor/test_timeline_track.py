"""A track gives back what was recorded, in order, and says how much it had no room for."""

from __future__ import annotations

from vla_async.monitor.timeline_track import Kind, Track


def recording(capacity: int = 4) -> Track:
    track = Track(capacity=capacity)
    track.is_on = True
    return track


def test_records_come_back_once_and_in_order_round_after_round() -> None:
    """Also where the ring has come round."""
    writer = recording()
    reader = Track(writer.block)
    for turn in range(5):
        for number in range(3):
            writer.add(Kind.FORWARD, turn + 0.25, turn + 0.5, number, 10 * turn, -1)
        assert reader.drain(since=-1.0) == [
            ((turn + 1) * 10**9 + 250_000_000, (turn + 1) * 10**9 + 500_000_000, Kind.FORWARD, (number, 10 * turn, -1))
            for number in range(3)
        ]
    assert reader.drain(since=-1.0) == []
    assert reader.newly_lost() == 0


def test_what_finds_no_room_is_counted_and_what_was_recorded_before_stays() -> None:
    """The oldest are kept: they are whole, and the reader may be at them."""
    track = recording(capacity=4)
    for number in range(7):
        track.add(Kind.NO_SLOT, 0.0, 1.0, number)
    assert track.newly_lost() == 3
    assert track.newly_lost() == 0
    assert [record.args[0] for record in track.drain(0.0)] == [0, 1, 2, 3]
    track.add(Kind.NO_SLOT, 0.0, 1.0, 7)
    assert [record.args[0] for record in track.drain(0.0)] == [7]
    assert track.newly_lost() == 0


def test_only_what_is_wanted_is_recorded() -> None:
    track = recording()
    track.is_on = False
    track.add(Kind.SWAP, 0.0, 1.0, 1)
    assert track.drain(0.0) == []
    assert track.newly_lost() == 0
