"""Rows of a group start together and are handed on together; whatever order they come in, nothing waits for ever."""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_async import keys
from vla_async.collectors.acting import VERSION_LEAF
from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.groups import Grouping
from vla_async.collectors.slab import Leaf, Slab, SlabLayout
from vla_async.collectors.wires import SLOT_RECORD
from vla_async.data.groups import GroupLedger
from vla_async.data.queue import TrajectoryQueue
from vla_async.shared_memory import Channel


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_the_rows_of_a_group_run_one_task_and_every_row_is_in_one_group(size: int, tasks: int) -> None:
    grouping = Grouping(size, 2 * size * tasks, tasks)
    members = [grouping.rows_of(group) for group in range(grouping.num_groups)]
    assert sorted(row for rows in members for row in rows) == list(range(grouping.num_rows))
    for rows in members:
        assert len(rows) == size
        assert len({row % tasks for row in rows}) == 1
    ids = {grouping.id_of(group, episode) for group in range(grouping.num_groups) for episode in range(7)}
    assert len(ids) == 7 * grouping.num_groups, "group ids repeat"


def test_a_group_of_one_row_is_that_row() -> None:
    """So that an objective without groups gets the seeds that it would get without this."""
    assert [Grouping(1, 6, 3).group_of(row) for row in range(6)] == list(range(6))


def test_after_a_resume_no_group_lacks_a_row_that_has_begun_its_episode_before() -> None:
    assert Grouping(2, 8, 2).aligned([3, 0, 5, 1, 2, 2, 2, 4]) == [5, 1, 5, 1, 2, 4, 2, 4]


class NeverWaiting(TrajectoryQueue):
    """A queue in a test with a single thread: while it waits, nothing can come."""

    def _wait(self) -> None:
        raise AssertionError("the consumer waits, and nobody is left to end it")


class Rollout:
    """Rows that begin what they are admitted to, one episode at a time; the test says which ends next."""

    def __init__(self, grouping: Grouping, num_slots: int) -> None:
        leaves = (VERSION_LEAF, Leaf((keys.GROUP_ID,), (1,), torch.int64, "decision"))
        self.slab = Slab(SlabLayout(leaves, num_slots, 1, spans_episodes=False))
        self.board, self.grouping = Board(grouping.num_rows, num_slots, 1), grouping
        self.board.admitted[:] = 0
        context = mp.get_context("spawn")
        self.finished, self.free = Channel(context, SLOT_RECORD), Channel(context, SLOT_RECORD)
        self.ledger = GroupLedger(grouping, self.slab, self.board, lambda rows: None)
        self.queue = NeverWaiting(self.slab, self.board, self.finished, self.free, lambda: None, self.ledger)
        self.queue.open()
        self.playing: dict[int, int] = {}

    def begin(self, version: int) -> None:
        for row in range(self.grouping.num_rows):
            if row not in self.playing and self.board.episodes[row] < self.board.admitted[row]:
                [(slot,)] = self.free.receive(1)  # whoever is admitted has a slot
                group = self.grouping.id_of(self.grouping.group_of(row), int(self.board.episodes[row]))
                self.slab.rows((keys.GROUP_ID,))[2 * slot] = group
                self.slab.rows(VERSION_LEAF.key)[2 * slot] = version
                self.board.episodes[row] += 1
                self.board.state[slot] = SlotState.ACTING
                self.playing[row] = slot

    def end(self, row: int, lost: bool = False) -> None:
        slot = self.playing.pop(row)
        self.board.state[slot] = SlotState.DROPPED if lost else SlotState.FINISHED
        self.finished.send(slot)

    def groups(self, slots: list[int]) -> Counter[int]:
        return Counter(self.ledger.id_of(slot) for slot in slots)

    def can_take(self, version: int, eta: int, bundles: int) -> bool:
        len(self.queue)  # takes in what has been finished
        return bool(self.queue._choose(bundles, version, eta))

    def close(self) -> None:
        self.finished.close()
        self.free.close()


def test_a_short_group_does_not_wait_for_a_long_one_and_a_lost_member_is_not_waited_for() -> None:
    rollout = Rollout(Grouping(2, 4), 8)
    rollout.begin(0)
    rollout.end(0)
    rollout.end(3)
    assert len(rollout.queue) == 0, "half a group was handed out"
    assert rollout.queue.in_flight == 2
    rollout.end(2, lost=True)
    assert rollout.groups(rollout.queue.take(1, 0, 1)) == {1: 1}
    rollout.end(1)
    assert rollout.groups(rollout.queue.take(1, 0, 1)) == {0: 2}
    assert rollout.queue.dropped == {"worker ended": 1}
    rollout.close()


def test_a_group_of_which_nothing_is_left_is_passed_over() -> None:
    rollout = Rollout(Grouping(2, 4), 8)
    rollout.begin(0)
    for row in range(4):
        rollout.end(row, lost=row < 2)
    assert rollout.groups(rollout.queue.take(1, 0, 1)) == {1: 2}
    rollout.queue.check_balance()
    rollout.close()


def test_a_finished_member_is_due_with_its_group() -> None:
    """Group 0 is ready and would do; but of group 1, one member is finished and would be too old after this update."""
    rollout = Rollout(Grouping(2, 4), 4)
    rollout.begin(0)
    rollout.end(2)
    rollout.end(0)
    rollout.end(1)
    assert rollout.can_take(0, 1, 1)
    rollout.queue.release(rollout.queue.take(1, 0, 1))
    rollout.begin(1)
    rollout.end(0)
    rollout.end(1)
    assert not rollout.can_take(1, 1, 1), "group 1 would be two versions old"
    rollout.end(3)
    assert rollout.groups(rollout.queue.take(1, 1, 1)) == {1: 2}
    rollout.close()


def test_a_lost_member_makes_no_room_for_more_groups_than_can_be_used_in_time() -> None:
    rollout = Rollout(Grouping(2, 4), 4)
    rollout.begin(0)
    rollout.end(0, lost=True)
    rollout.end(2, lost=True)
    assert len(rollout.queue) == 0
    assert rollout.board.admitted.tolist() == [1, 1, 1, 1]
    rollout.close()


def test_the_group_with_the_least_under_way_is_admitted_first() -> None:
    rollout = Rollout(Grouping(2, 4), 6)
    assert rollout.board.admitted.tolist() == [2, 2, 1, 1]
    rollout.begin(0)
    rollout.end(2)
    rollout.end(3)
    rollout.queue.release(rollout.queue.take(1, 0, 1))
    assert rollout.board.admitted.tolist() == [2, 2, 2, 2]
    rollout.close()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3),
    tasks=st.integers(1, 2),
    groups=st.integers(1, 3),
    eta=st.integers(0, 2),
    lose=st.integers(0, 9),
    order=st.lists(st.integers(0, 999), min_size=6, max_size=30),
)
def test_the_bound_holds_and_nothing_waits_for_ever(
    size: int, tasks: int, groups: int, eta: int, lose: int, order: list[int]
) -> None:
    """Rows end in any order, some of them lost; the consumer always gets its groups, whole, and none too old."""
    grouping = Grouping(size, size * tasks * groups, tasks)
    rollout = Rollout(grouping, (eta + 1) * grouping.num_rows)
    seen: set[int] = set()
    for version, choice in enumerate(order):
        rollout.begin(version)
        while not rollout.can_take(version, eta, grouping.num_groups):
            rows = sorted(rollout.playing)
            choice = 7 * choice + 3
            rollout.end(rows[choice % len(rows)], lost=choice % 10 == lose)  # fails if nobody plays: all would wait
            len(rollout.queue)
            rollout.begin(version)
        slots = rollout.queue.take(grouping.num_groups, version, eta)
        assert min(rollout.slab.oldest_version(slot) for slot in slots) >= version - eta
        names = rollout.groups(slots)
        assert len(names) == grouping.num_groups
        assert not seen & names.keys(), "a group came in parts"
        seen |= names.keys()
        rollout.queue.release(slots)
        rollout.queue.check_balance()
    assert set(rollout.queue.dropped) <= {"worker ended"}, "something was dropped for its age"
    rollout.close()


def test_slots_that_are_withheld_leave_the_circulation() -> None:
    """Of the 8 slots 4 stay, whole groups go on, and the counters still add up."""
    rollout = Rollout(Grouping(2, 4), 8)
    rollout.queue.withhold(4)
    for version in range(6):
        rollout.begin(version)
        for row in [*rollout.playing]:
            rollout.end(row)
        slots = rollout.queue.take(1, version, 5)
        assert sorted(rollout.groups(slots).values()) == [2]
        rollout.queue.release(slots)
    under_way = int(rollout.board.admitted.sum()) - 2 * 6
    assert under_way == 4, "episodes that may be played before another is consumed"
    rollout.queue.check_balance()
    rollout.close()
