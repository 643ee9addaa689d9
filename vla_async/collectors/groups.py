"""``Grouping``: which rows start their episodes in the same states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grouping:
    """Rows in groups: the k-th episodes of a group's rows share a seed, and so their first state, and a group id.

    Row i runs task ``i % num_tasks``, and so do all rows of its group. A group of one row is that row.

    Args:
        size: G, rows of a group.
        num_rows: N, rows in all; a multiple of ``size * num_tasks``, so that no group is short.
        num_tasks: how many tasks the rows run.
    """

    size: int
    num_rows: int
    num_tasks: int = 1

    @property
    def num_groups(self) -> int:
        return self.num_rows // self.size

    def group_of(self, row: int) -> int:
        """The group that a row is in, in ``[0, num_groups)``."""
        return row % self.num_tasks + self.num_tasks * (row // self.num_tasks // self.size)

    def rows_of(self, group: int) -> list[int]:
        """The rows of a group, ascending."""
        return [row for row in range(self.num_rows) if self.group_of(row) == group]

    def id_of(self, group: int, episode: int) -> int:
        """The group id of a group's ``episode``-th episodes; no other ones have it."""
        return group + self.num_groups * episode

    def aligned(self, episodes: Sequence[int]) -> list[int]:
        """Where each row has to go on so that groups are whole: behind what any row of its group has begun."""
        latest = [0] * self.num_groups
        for row, begun in enumerate(episodes):
            latest[self.group_of(row)] = max(latest[self.group_of(row)], begun)
        return [latest[self.group_of(row)] for row in range(self.num_rows)]
