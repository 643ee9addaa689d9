"""``GroupLedger``: which rows may begin an episode, and which finished ones belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vla_async import keys
from vla_async.collectors.board import Board
from vla_async.collectors.groups import Grouping
from vla_async.collectors.slab import Slab


class GroupLedger:
    """Admits the rows of a group to their next episodes together, and hands their slots on together.

    A group is admitted only when there are slots for all of its rows, which then are theirs until all of the group are
    given back. So whatever has begun can be finished: members that wait for the rest of their group never keep it from a
    slot. Each admitted episode comes back exactly once, finished or dropped. Which order they come back in does not matter,
    and several groups, also of the same rows, may be under way.

    Args:
        grouping: which rows belong together.
        slab: its slots have the group id in their first row from the moment that they are begun.
        board: shared bookkeeping.
        wake: called with rows that have been admitted.

    Attributes:
        waiting: finished slots that wait for the rest of their group.
    """

    def __init__(self, grouping: Grouping, slab: Slab, board: Board, wake: Callable[[Sequence[int]], None]) -> None:
        self.grouping, self.board, self._wake = grouping, board, wake
        self._rows = [grouping.rows_of(group) for group in range(grouping.num_groups)]
        self._ids = slab.rows((keys.GROUP_ID,)).numpy()[:: slab.layout.rows_per_slot, 0]
        self._under_way = np.zeros(grouping.num_groups, np.int64)  # admitted, and not whole yet
        self._came: dict[int, int] = {}  # by group id, how many have come back
        self._finished: dict[int, list[int]] = {}  # and the slots of those that can be used
        self._to_withhold, self.waiting = 0, 0

    def id_of(self, slot: int) -> int:
        """The group id of a slot that has been begun."""
        return int(self._ids[slot])

    def freed(self, groups: int) -> None:
        """There are slots for so many groups more: admit first those that have the fewest episodes under way."""
        withheld = min(groups, self._to_withhold)
        self._to_withhold -= withheld
        admitted = self.board.admitted
        for _ in range(groups - withheld):
            fewest = np.flatnonzero(self._under_way == self._under_way.min())
            group = min(fewest.tolist(), key=lambda group: int(admitted[self._rows[group][0]]))
            self._under_way[group] += 1
            admitted[self._rows[group]] += 1
            self._wake(self._rows[group])

    def withhold(self, groups: int) -> None:
        """Admit so many groups less from now on, which leaves their slots unused."""
        self._to_withhold += groups

    def came_back(self, slot: int, *, usable: bool) -> tuple[int, ...] | None:
        """Take in a slot that is finished, or dropped (not usable).

        Returns:
            All usable slots of its group, if nothing of it is missing any more; None if something is.
        """
        group = self.id_of(slot)
        self._came[group] = self._came.get(group, 0) + 1
        slots = self._finished.setdefault(group, [])
        if usable:
            slots.append(slot)
            self.waiting += 1
        if self._came[group] < self.grouping.size:
            return None
        del self._came[group], self._finished[group]
        self.waiting -= len(slots)
        self._under_way[group % self.grouping.num_groups] -= 1
        return tuple(slots)
