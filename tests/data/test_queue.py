"""What is finished is consumed, dropped for a reason, or still there; nothing is older than was asked for. One process."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.queue_fakes import Rig
from vla_async.collectors.board import SlotState
from vla_async.collectors.wires import ALARM


def test_a_slot_goes_round() -> None:
    rig = Rig(2)
    first, second = rig.begin(0), rig.begin(0)
    rig.finish(second)
    rig.finish(first)
    assert rig.queue.take(2, version=0) == [second, first]
    assert rig.free_slots() == [], "a slot is not written to while the consumer has it"
    assert rig.queue.counts() == {"produced": 2, "consumed": 0, "in_flight": 2}
    rig.queue.release([first, second])
    assert rig.free_slots() == [first, second]
    assert rig.queue.counts() == {"produced": 2, "consumed": 2, "in_flight": 0}
    rig.close()


def test_what_must_not_wait_longer_comes_first() -> None:
    """A batch by arrival would leave the old one behind, until it is too old."""
    rig = Rig(3)
    old, new, newer = rig.begin(0), rig.begin(1), rig.begin(1)
    for slot in (new, newer, old):
        rig.finish(slot)
    assert rig.queue.take(2, version=1, max_staleness=1) == [old, new]
    rig.close()


def test_a_straggler_is_waited_for_before_it_would_be_too_old() -> None:
    """Two slots are ready, which is enough; but the third would be two versions old after the update."""
    rig = Rig(3)
    straggler, *others = rig.begin(0), rig.begin(1), rig.begin(1)
    for slot in others:
        rig.finish(slot)
    late = threading.Timer(0.05, rig.finish, [straggler])
    late.start()
    assert straggler in rig.queue.take(2, version=1, max_staleness=1)
    late.join()
    rig.close()


def test_what_is_too_old_all_the_same_is_dropped_and_counted() -> None:
    """After a jump of the version, as at a resume."""
    rig = Rig(2)
    old, fine = rig.begin(0), rig.begin(4)
    rig.finish(old)
    rig.finish(fine)
    assert rig.queue.take(1, version=5, max_staleness=1) == [fine]
    assert rig.queue.counts() == {"produced": 2, "consumed": 0, "in_flight": 1, "dropped/stale": 1}
    assert rig.free_slots() == [old]
    rig.close()


def test_a_slot_of_a_dead_worker_is_dropped_and_counted() -> None:
    rig = Rig(2)
    lost, fine = rig.begin(0), rig.begin(0)
    rig.finish(lost, SlotState.DROPPED)
    rig.finish(fine)
    assert rig.queue.take(1, version=0) == [fine]
    assert rig.queue.counts() == {"produced": 2, "consumed": 0, "in_flight": 1, "dropped/worker ended": 1}
    rig.close()


def test_the_slots_that_a_dead_worker_had_just_taken_are_found() -> None:
    """It died after it took slot 0 and before it said so, while others were taken, written, finished and held."""
    rig = Rig(5, num_rows=1)
    [(vanished,)] = rig.free.receive(1)
    written, finished, held = rig.begin(0), rig.begin(0), rig.begin(0)
    rig.finish(held)
    rig.queue.take(1, version=0)
    rig.finish(finished)
    claiming = iter([True, True, False])
    rig.queue.recover(lambda: next(claiming))
    assert rig.free_slots() == sorted([vanished, 4]), "each exactly once"
    assert {written, finished, held}.isdisjoint(rig.free_slots())
    rig.close()


def test_an_error_elsewhere_ends_the_wait() -> None:
    rig = Rig(1)
    rig.error = ArithmeticError("the replica broke")
    alarm = threading.Timer(0.05, rig.finished.send, [ALARM])
    alarm.start()
    with pytest.raises(ArithmeticError, match="the replica broke"):
        rig.queue.take(1, version=0)
    alarm.join()
    rig.close()


def test_another_thread_can_end_the_wait() -> None:
    rig = Rig(1)
    alarm = threading.Timer(0.05, rig.finished.send, [ALARM])
    alarm.start()
    assert rig.queue.take(1, version=0) == []
    alarm.join()
    rig.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 3), min_size=5, max_size=40))
def test_nothing_is_older_than_the_bound_and_nothing_is_lost(batch: int, eta: int, order: list[int]) -> None:
    """Workers finish in any order; with free slots as the only pace, no slot is ever dropped for its age."""
    rig = Rig((eta + 1) * batch)
    acting: list[int] = []
    for version, choice in enumerate(order):
        while rig.free_slots():
            acting.append(rig.begin(version))
        while not rig.would_hand_out(batch, version, eta):
            rig.finish(acting.pop(choice % len(acting)))  # the consumer would wait; the workers go on
        slots = rig.queue.take(batch, version, eta)
        assert min(rig.slab.oldest_version(slot) for slot in slots) >= version - eta
        rig.queue.release(slots)
        counts = rig.queue.counts()
        assert counts["produced"] == counts["consumed"] + counts["in_flight"], "nothing was dropped"
    rig.close()


def test_withheld_slots_leave_the_circulation_at_once_if_nobody_has_them() -> None:
    rig = Rig(4)
    mine = rig.begin(0)
    rig.queue.withhold(2)
    assert len(rig.free_slots()) == 1
    rig.queue.withhold(2)  # one is free, the other is being written to
    assert rig.free_slots() == []
    rig.finish(mine)
    rig.queue.release(rig.queue.take(1, version=0))
    assert rig.free_slots() == []
    assert (rig.board.state == SlotState.WITHHELD).all()
    rig.queue.recover(lambda: False)
    assert rig.free_slots() == [], "a worker's death brought them back"
    rig.close()


def test_what_is_finished_but_not_heard_of_yet_is_waited_for_when_it_is_due() -> None:
    """A replica says that a slot is finished before the record is in the channel."""
    rig = Rig(3)
    straggler, *others = rig.begin(0), rig.begin(1), rig.begin(1)
    for slot in others:
        rig.finish(slot)
    rig.board.state[straggler] = SlotState.FINISHED
    assert not rig.would_hand_out(2, version=1, eta=1)
    rig.finish(straggler)
    assert straggler in rig.queue.take(2, version=1, max_staleness=1)
    rig.close()
