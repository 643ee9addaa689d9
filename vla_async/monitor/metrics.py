"""Counting: metrics as (sum, count), success rates with their interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Confidence interval of a success rate.

    Wilson's score interval (E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22, 1927), which stays inside [0, 1] and is usable at 0 and at n successes.

    Args:
        successes: how many of the ``n`` episodes succeeded.
        n: number of episodes.
        z: quantile; 95 % by default.

    Raises:
        ValueError: unless ``0 <= successes <= n`` and ``n >= 1``.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes} of n={n}: need n >= 1 and 0 <= successes <= n")
    rate = successes / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # at 0 and at n successes one end is exactly 0 or 1, which rounding must not miss
    low = 0.0 if successes == 0 else (centre - spread) / scale
    return low, 1.0 if successes == n else (centre + spread) / scale


@dataclass(frozen=True)
class SuccessRate:
    """A success rate that says what it rests on."""

    successes: int
    n: int

    @property
    def rate(self) -> float:
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        return wilson_interval(self.successes, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.2f} [{low:.2f}, {high:.2f}] n={self.n}"


@dataclass
class Meter:
    """Adds up (sum, count) metrics over the micro-batches of a step; ``means`` divides once."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor | float]]) -> None:
        """Add what one micro-batch gave; nothing is moved off its device."""
        for name, (total, count) in metrics.items():
            total = total.detach()
            self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
            self.counts[name] = self.counts.get(name, torch.zeros_like(total)) + count

    def merge(self, other: Meter) -> None:
        """Add what another meter has counted."""
        self.add({name: (other.sums[name], other.counts[name]) for name in other.sums})

    def total(self, name: str) -> float:
        """The sum of one metric."""
        return float(self.sums.get(name, 0.0))

    def means(self) -> dict[str, float]:
        """Name to sum / count; a metric that counted nothing is left out."""
        counts = {name: float(count) for name, count in self.counts.items()}
        return {name: float(total) / counts[name] for name, total in self.sums.items() if counts[name] > 0}


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else float("nan")
