"""How long something takes: the distributions that emulated steps are drawn from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


class Duration(ABC):
    """A random time in seconds."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expected value in seconds."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> float:
        """One time in seconds, never negative."""


@dataclass(frozen=True)
class Constant(Duration):
    """Always the same time.

    Args:
        seconds: that time; 0 for what takes none.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        _check("Constant.seconds", self.seconds, self.seconds >= 0.0, "must be 0 or a positive number of seconds")

    @property
    def mean(self) -> float:
        return self.seconds

    def draw(self, generator: np.random.Generator) -> float:
        return self.seconds


@dataclass(frozen=True)
class Uniform(Duration):
    """Any time between two bounds, equally likely: jitter.

    Args:
        low: lower bound in seconds.
        high: upper bound in seconds.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check("Uniform.low", self.low, self.low >= 0.0, "must be 0 or a positive number of seconds")
        _check("Uniform.high", self.high, self.high >= self.low, f"must be at least Uniform.low={self.low}")

    @property
    def mean(self) -> float:
        return 0.5 * (self.low + self.high)

    def draw(self, generator: np.random.Generator) -> float:
        return self.low + (self.high - self.low) * generator.random()


@dataclass(frozen=True)
class LogNormal(Duration):
    """Mostly short, now and then very long: a heavy tail.

    Args:
        mean_s: expected value in seconds.
        sigma: standard deviation of the logarithm; 1 gives a tail in which one step of a hundred takes six times the mean.
    """

    mean_s: float
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check("LogNormal.mean_s", self.mean_s, self.mean_s > 0.0, "must be a positive number of seconds")
        _check("LogNormal.sigma", self.sigma, self.sigma >= 0.0, "must be 0 or positive")

    @property
    def mean(self) -> float:
        return self.mean_s

    def draw(self, generator: np.random.Generator) -> float:
        return self.mean_s * math.exp(self.sigma * generator.standard_normal() - 0.5 * self.sigma**2)


def _check(name: str, value: float, valid: bool, fix: str) -> None:
    if not (math.isfinite(value) and valid):
        raise ValueError(f"{name}={value} {fix}")
