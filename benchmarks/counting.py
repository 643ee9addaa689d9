"""Envs that count their steps where other processes can read it: a rate should not depend on how frames are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vla_async.envs import EnvFactory, SimStep, Simulator
from vla_async.shared_memory import numbers


class CountingSimulator(Simulator):
    """Passes everything on to another simulator, and counts the env steps of its rows in a file.

    Args:
        inner: what is stepped.
        counts: where row ``i`` counts.
    """

    def __init__(self, inner: Simulator, counts: NDArray[np.int64]) -> None:
        self.inner, self._counts = inner, numbers(counts)
        self.num_rows, self.device = inner.num_rows, inner.device
        self.action_low, self.action_high = inner.action_low, inner.action_high

    @property
    def instructions(self) -> Sequence[str]:
        return self.inner.instructions

    @property
    def tasks(self) -> Sequence[str]:
        return self.inner.tasks

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        return self.inner.reset(rows, seeds)

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        result = self.inner.step(action, rows)
        for row, takes_part in enumerate(rows.tolist()):
            self._counts[row] += takes_part
        return result

    def close(self) -> None:
        """Close the inner simulator."""
        self.inner.close()


@dataclass(kw_only=True)
class CountedEnvs(EnvFactory):
    """The envs of another factory, counted.

    Args:
        inner: the factory.
        path: file of ``inner.num_envs`` int64 numbers, see :func:`open_counts`.
    """

    inner: EnvFactory
    path: str

    def __post_init__(self) -> None:
        for name in ("num_envs", "chunk_size", "max_episode_steps", "on_success"):
            setattr(self, name, getattr(self.inner, name))
        super().__post_init__()

    @property
    def task_names(self) -> list[str]:
        return self.inner.task_names

    @property
    def observation_names(self) -> frozenset[str] | None:
        return self.inner.observation_names

    @property
    def is_batched(self) -> bool:
        return self.inner.is_batched

    def make_simulator(self, index: int, render: bool = False) -> CountingSimulator:
        simulator = self.inner.make_simulator(index, render)
        return CountingSimulator(simulator, open_counts(self.path)[index : index + simulator.num_rows])


def open_counts(path: str, num_envs: int | None = None) -> NDArray[np.int64]:
    """The counters in a file, shared with everyone who opens it; made anew, all zero, if their number is given."""
    options: dict[str, Any] = {"mode": "r+"} if num_envs is None else {"mode": "w+", "shape": (num_envs,)}
    return np.memmap(path, dtype=np.int64, **options)
