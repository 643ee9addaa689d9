"""Small pictures made of characters: sparklines and bars, and curves that stay short however long a run is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"


class Curve:
    """The values of a whole run in a bounded number: where they become too many, each two neighbours become their mean.

    One thread adds, others may read :attr:`values` meanwhile.

    Attributes:
        values: from the first to the newest.
        each: how many that were added a value is the mean of.
        pending: those that were added and are in no value yet.

    Args:
        limit: the most values.
    """

    def __init__(self, limit: int = 256) -> None:
        if limit < 2:
            raise ValueError(f"limit={limit} must be at least 2")
        self.limit = limit
        self.values: tuple[float, ...] = ()
        self.each = 1
        self.pending: list[float] = []

    def add(self, value: float) -> None:
        """Add the next value."""
        self.pending.append(value)
        if len(self.pending) < self.each:
            return
        values = [*self.values, sum(self.pending) / self.each]
        self.pending = []
        if len(values) > self.limit:
            self.each *= 2
            if len(values) % 2:
                self.pending = [values.pop()] * (self.each // 2)
            values = [(values[i] + values[i + 1]) / 2 for i in range(0, len(values), 2)]
        self.values = tuple(values)


def sparkline(values: Sequence[float], width: int, low: float = 0.0, high: float = 1.0) -> str:
    """A line of blocks whose heights are the values.

    Args:
        values: what to draw; where there are more than ``width``, neighbours are drawn as their mean.
        width: the most characters.
        low: value of the lowest block, and of all below it.
        high: value of the highest block, and of all above it.

    Returns:
        As many characters as there are values, at most ``width``; blanks for what is not finite.
    """
    count = max(0, min(len(values), width))
    edges = [number * len(values) // count for number in range(count + 1)] if count else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    return "".join(_block(value, low, high) for value in means)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    height = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[int(min(max(height, 0.0), 1.0) * len(_BLOCKS) - 1e-9)]


def bar(share: float, width: int, style: str) -> Text:
    """A bar of ``width`` characters, of which a share in [0, 1] is filled; it can be read without colours too."""
    halves = round(min(max(share, 0.0), 1.0) * 2 * max(width, 0))
    full, half = divmod(halves, 2)
    return Text.assemble(("━" * full + "╸" * half, style), ("─" * (width - full - half), "dim"))
