"""``FreeSlots``: what comes back is free again, however it was held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.data.queue_fakes import Rig
from vla_async.collectors.board import SlotState
from vla_async.data.free_slots import FreeSlots


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("withheld", [0, 1])
def test_all_slots_of_a_group_come_back(form: Callable[[Iterable[int]], Sequence[int]], withheld: int) -> None:
    """A group that was dropped is a tuple of slots, which must not be taken for an index."""
    rig = Rig(num_slots=4)
    slots = [rig.begin() for _ in range(4)]
    free = FreeSlots(rig.board, rig.free)
    free.withhold(withheld)  # nobody has one: the first that comes back is kept
    rig.board.owner[slots] = 0
    free.give(form(slots[:3]))
    assert rig.board.state[slots[withheld:3]].tolist() == [SlotState.FREE] * (3 - withheld)
    assert rig.board.state[slots[:withheld]].tolist() == [SlotState.WITHHELD] * withheld
    assert rig.board.owner[slots[withheld:3]].tolist() == [-1] * (3 - withheld)
    assert [slot for (slot,) in rig.free.receive(4)] == slots[withheld:3]
    rig.close()
