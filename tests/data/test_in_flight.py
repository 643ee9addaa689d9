"""What is saved of a slab is what is found again in another, as far as it can still be used; and the counts add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.queue_fakes import Rig, T
from vla_async.collectors.acting import VERSION_LEAF
from vla_async.collectors.board import SlotState
from vla_async.data.counts import counts_when_saved
from vla_async.data.in_flight import restore_bundles, save_bundles

R = T + 1


def filled(versions: list[tuple[int, int]]) -> Rig:
    """A rig whose slots hold two decisions each, of these versions."""
    rig = Rig(len(versions))
    rows = rig.slab.rows(VERSION_LEAF.key).reshape(-1, R)
    rows[:, :T] = torch.tensor(versions)
    rows[:, T] = 99  # the row behind the last decision is nobody's
    rig.slab.length[:] = T
    rig.slab.rows(("done",))[:] = torch.arange(len(versions) * R).unsqueeze(-1) % 2 == 0
    return rig


def first_versions(rig: Rig, bundles: list[tuple[int, ...]]) -> list[list[int]]:
    return [[rig.slab.oldest_version(slot) for slot in bundle] for bundle in bundles]


def test_bundles_keep_their_order_their_members_and_what_they_hold() -> None:
    rig, other = filled([(0, 0), (1, 1), (2, 2), (3, 3)]), Rig(5)
    saved = save_bundles(rig.slab, [(2,), (3, 0)])
    bundles = restore_bundles(other.slab, saved, version=3, room=5)
    assert bundles == [(0,), (1, 2)]
    assert first_versions(other, bundles) == [[2], [3, 0]]
    for old, new in [(2, 0), (3, 1), (0, 2)]:
        assert torch.equal(rig.slab.rows(("done",)).reshape(-1, R)[old], other.slab.rows(("done",)).reshape(-1, R)[new])
    other.queue.open(bundles)  # the first open, of an empty queue, let the envs have all
    assert len(other.queue) == 2
    assert other.board.state.tolist()[:3] == [SlotState.FINISHED] * 3
    rig.close()
    other.close()


def test_what_newer_weights_decided_is_left_out_for_these_weights_are_lost() -> None:
    rig = filled([(1, 1), (1, 2), (0, 1)])
    saved = save_bundles(rig.slab, [(0,), (1,), (2,)])
    assert first_versions(rig, restore_bundles(rig.slab, saved, version=1, room=3)) == [[1], [0]]
    rig.close()


def test_where_there_is_less_room_the_oldest_are_left_out() -> None:
    rig = filled([(1, 1), (0, 2), (2, 2)])
    saved = save_bundles(rig.slab, [(0,), (1,), (2,)])
    assert first_versions(rig, restore_bundles(rig.slab, saved, version=2, room=2)) == [[1], [2]]
    assert restore_bundles(rig.slab, saved, version=2, room=0) == []
    rig.close()


def test_nothing_that_waits_is_saved_and_restored_as_nothing() -> None:
    rig = Rig(2)
    assert restore_bundles(rig.slab, save_bundles(rig.slab, []), version=0, room=2) == []
    rig.close()


def test_what_other_slots_held_is_refused_with_a_warning() -> None:
    rig = filled([(0, 0)])
    saved = save_bundles(rig.slab, [(0,)])
    saved["layout"]["decisions"] = 7
    with pytest.warns(UserWarning, match="1 trajectories in flight are dropped"):
        assert restore_bundles(rig.slab, saved, version=0, room=1) == []
    rig.close()


def test_restored_slots_are_not_given_to_the_envs_until_they_are_consumed() -> None:
    rig = Rig(3)
    assert rig.free_slots() == [0, 1, 2]
    for _ in range(3):
        rig.begin(0)
    rig.queue.open([(0,), (1,)])
    assert rig.free_slots() == [2]
    rig.queue.release(rig.queue.take(1, version=0, max_staleness=1))
    assert rig.free_slots() == [2, 0]
    rig.close()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_counts_of_a_checkpoint_add_up_whatever_happened_since_its_step(
    consumed: int, since: int, stale: int, waits: int, in_progress: int
) -> None:
    now = {"produced": consumed + since + stale + waits, "consumed": consumed + since, "in_flight": waits}
    counts = counts_when_saved(now | {"dropped/stale": stale}, consumed, in_progress)
    assert counts["consumed"] == consumed
    assert counts["in_flight"] == since + waits + in_progress
    assert counts["produced"] == counts["consumed"] + counts["in_flight"] + counts["dropped/stale"]
