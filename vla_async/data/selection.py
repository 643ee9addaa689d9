"""Which of the bundles that are ready are handed out: what must not wait any longer, then what is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

Selection = Literal["oldest", "freshest", "balanced_tasks"]
"""What is preferred where the bound on staleness leaves a choice. ``oldest``: the oldest weights. ``freshest``: the newest
ones; what is passed over waits until the bound asks for it, and as nothing is thrown away, this spreads the staleness rather
than lowering its mean. ``balanced_tasks``: the task whose turn was longest ago.
"""
SELECTIONS: tuple[str, ...] = get_args(Selection)


def choose(
    ages: Sequence[int],
    preferred: Sequence[int],
    in_progress: Sequence[int],
    count: int,
    *,
    version: int,
    max_staleness: int,
    earlier: int = 0,
    later: int = 0,
) -> list[int]:
    """The bundles to hand out, or none if it has to be waited for one in progress.

    What began with weights o can be used until version o + η. Its turn comes in time, whatever finishes when, if after each
    batch at most j batches' worth of bundles have to be used within the next j. So many of those that are due by then as are
    too many for that are taken now, by preference among them, and only the rest of ``count`` is a matter of preference
    alone. Whether something has to be waited for does not depend on the preference: the sets of what is due within j batches
    lie inside each other, so as many of each can be taken as by taking the oldest first.

    Args:
        ages: of each bundle that is ready, the version that it began with.
        preferred: the numbers of all of these, best first.
        in_progress: the versions of the bundles of which something is missing.
        count: how many to hand out; so many are ready.
        version: number of updates behind the consumer's weights.
        max_staleness: η.
        earlier: how many bundles were taken for the same update before.
        later: how many more will be.

    Returns:
        Their numbers.
    """
    taken: dict[int, None] = {}  # ordered
    per_update = earlier + count + later
    for batches in range(max_staleness + 1):
        due = version + batches - max_staleness  # what began with these weights, or older ones, has to be used by then
        underway = sum(age <= due for age in in_progress)
        must = sum(age <= due for age in ages) + underway - batches * per_update - later
        at_hand = [number for number in preferred if ages[number] <= due and number not in taken]
        room = min(len(at_hand), count - len(taken))
        if must - len(taken) > room and underway:  # else, as after a jump, it is in vain to wait
            return []
        taken |= dict.fromkeys(at_hand[: min(max(must - len(taken), 0), room)])
    return [*taken, *(number for number in preferred if number not in taken)][:count]


class Turns:
    """Tasks take turns: whose last one is longest ago is next."""

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}  # by task, when something of it was handed out
        self._number = 0

    def order(self, tasks: Sequence[bytes], by_age: Sequence[int]) -> list[int]:
        """The numbers of bundles, best first.

        Args:
            tasks: of each bundle.
            by_age: their numbers, the oldest first.
        """
        of_task: dict[bytes, list[int]] = {}
        for number in by_age:
            of_task.setdefault(tasks[number], []).append(number)
        waiting = sorted(of_task.values(), key=lambda numbers: self._last.get(tasks[numbers[0]], -1))
        longest = max(map(len, waiting), default=0)
        return [numbers[turn] for turn in range(longest) for numbers in waiting if turn < len(numbers)]

    def took(self, tasks: Sequence[bytes]) -> None:
        """Note what has been handed out, in this order."""
        for task in tasks:
            self._number += 1
            self._last[task] = self._number
