"""What is preferred is handed out first, but what the bound on staleness asks for always before it; nothing is kept back."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.queue_fakes import Rig
from vla_async.data.selection import SELECTIONS, Selection, Turns, choose

SELECTION = st.sampled_from(SELECTIONS)


@settings(max_examples=120, deadline=None)
@given(
    SELECTION, st.integers(1, 4), st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 999), min_size=6, max_size=40)
)
def test_the_bound_holds_and_nothing_starves_whatever_is_preferred(
    selection: Selection, batch: int, eta: int, streams: bool, order: list[int]
) -> None:
    """Workers finish in any order; slots are the only pace. Where nobody acts while the consumer waits, ``pop`` fails."""
    rig = Rig((eta + 1) * batch)
    acting: list[int] = []
    began: dict[int, int] = {}
    for version, choice in enumerate(order):
        held: list[int] = []
        for earlier in range(batch if streams else 1):
            count, later = (1, batch - 1 - earlier) if streams else (batch, 0)
            while rig.free_slots():
                task = "abc"[(choice + len(acting)) % 3]
                acting.append(rig.begin(version, task))
                began[acting[-1]] = version
            while not rig.would_hand_out(count, version, eta, earlier, later, selection):
                choice = 7 * choice + 3
                rig.finish(acting.pop(choice % len(acting)))
            held += rig.queue.take(count, version, eta, earlier=earlier, later=later, selection=selection)
        assert len(held) == batch
        assert min(began[slot] for slot in held) >= version - eta
        rig.queue.release(held)
        rig.queue.check_balance()
        assert rig.queue.dropped == {}, "something was dropped for its age"
    rig.close()


@settings(max_examples=200, deadline=None)
@given(
    ready=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    progress=st.lists(st.integers(0, 4), max_size=3),
    eta=st.integers(0, 3),
    rest=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    data=st.data(),
)
def test_whether_to_wait_does_not_depend_on_the_preference_and_what_is_taken_leaves_the_rest_in_time(
    ready: list[int], progress: list[int], eta: int, rest: tuple[int, int], data: st.DataObject
) -> None:
    """Against all ways to choose: it waits exactly where none leaves the others in time, and else takes one that does."""
    version, (earlier, later) = 4, rest
    ready, progress = [max(age, version - eta) for age in ready], [max(age, version - eta) for age in progress]
    count = data.draw(st.integers(1, len(ready)))
    preferred = data.draw(st.permutations(range(len(ready))))

    def in_time(taken: tuple[int, ...]) -> bool:
        left = [age for number, age in enumerate(ready) if number not in taken] + progress
        size = earlier + count + later
        return all(sum(age <= version + j - eta for age in left) <= j * size + later for j in range(eta + 1))

    taken = choose(ready, preferred, progress, count, version=version, max_staleness=eta, earlier=earlier, later=later)
    possible = [ways for ways in combinations(range(len(ready)), count) if in_time(ways)]
    if possible:
        assert sorted(taken) in [list(ways) for ways in possible]
        if in_time(tuple(preferred[:count])):
            assert sorted(taken) == sorted(preferred[:count]), "the preferred ones would have done"
    else:  # it waits for what is in progress, unless what is too much is all ready: then it would be in vain
        size = earlier + count + later
        limits = [(version + j - eta, j * size + later) for j in range(eta + 1)]
        too_much = [due for due, limit in limits if sum(a <= due for a in sorted([*ready])[count:] + progress) > limit]
        assert bool(taken) == (min(progress, default=version + 1) > max(too_much))


def test_the_freshest_go_first_until_an_old_one_is_due() -> None:
    rig = Rig(4)
    old, newer = rig.begin(0), rig.begin(0)
    newest = rig.begin(1)
    for slot in (old, newer, newest):
        rig.finish(slot)
    assert rig.queue.take(1, version=1, max_staleness=3, selection="freshest") == [newest]
    assert rig.queue.take(1, version=2, max_staleness=3, selection="freshest") == [old], "or both were due at version 3"
    assert rig.queue.take(1, version=3, max_staleness=3, selection="freshest") == [newer]
    rig.close()


def test_tasks_take_turns_until_one_is_due() -> None:
    rig = Rig(6)
    slots = [rig.begin(version, task) for version, task in [(0, "a"), (0, "a"), (0, "a"), (1, "b"), (1, "c"), (1, "a")]]
    for slot in slots:
        rig.finish(slot)
    assert rig.queue.take(3, version=1, max_staleness=5, selection="balanced_tasks") == [slots[0], slots[3], slots[4]]
    late = rig.queue.take(2, version=5, max_staleness=5, selection="balanced_tasks")
    assert late == slots[1:3], "these had to be used now, whichever task's turn it was"
    rig.close()


def test_a_task_is_not_waited_for_when_its_turn_comes() -> None:
    rig = Rig(3)
    slots = [rig.begin(0, "a"), rig.begin(0, "a"), rig.begin(0, "b")]
    for slot in slots[:2]:
        rig.finish(slot)
    assert rig.queue.take(1, version=0, max_staleness=2, selection="balanced_tasks") == [slots[0]]
    assert rig.queue.take(1, version=0, max_staleness=2, selection="balanced_tasks") == [slots[1]]
    rig.close()


@pytest.mark.parametrize("taken", [["a"], ["b", "a"], ["c", "a", "b", "a"]])
def test_whose_turn_was_longest_ago_is_next(taken: list[str]) -> None:
    turns = Turns()
    turns.took([task.encode() for task in taken])
    first = turns.order([b"a", b"b", b"c"], [0, 1, 2])
    assert first[-1] == 0
    assert [task for task in "abc" if task not in taken] == ["abc"[number] for number in first][: 3 - len(set(taken))]
