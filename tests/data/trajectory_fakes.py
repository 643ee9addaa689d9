"""Episodes made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_async import keys
from vla_async.collectors.episodes import Episode
from vla_async.data.trajectories import Key, Trajectory

T, H, A = 3, 2, 2


def leaves(images: dict[str, tuple[int, int, int]] | None = None) -> dict[Key, Tensor]:
    """What happened in T decisions, of which the last executed one env step and ended the episode."""
    executed = torch.ones(T, H, dtype=torch.bool)
    executed[-1, 1:] = False
    flags = {key: torch.zeros(T, 1, dtype=torch.bool) for key in (keys.TERMINATED, keys.SUCCESS, keys.SUCCESS_ONCE)}
    return {
        keys.STATE: torch.arange(float(T)).unsqueeze(-1).expand(T, 4),
        **{("observation", name): torch.full((T, *shape), 7, dtype=torch.uint8) for name, shape in (images or {}).items()},
        keys.CHUNK: torch.full((T, H, A), 0.25),
        (keys.POLICY_VERSION,): torch.tensor([[3], [4], [5]]),
        keys.STEP_REWARDS: executed.float() * 0.5,
        keys.EXECUTED: executed,
        keys.TRUNCATED: torch.tensor([[False], [False], [True]]),
        **flags,
    }


def trajectory(
    success: bool = False,
    seed: int = 7,
    task: str = "push",
    images: dict[str, tuple[int, int, int]] | None = None,
    **info: Any,
) -> Trajectory:
    """An episode of T decisions."""
    final = {"state": torch.full((4,), float(T))}
    final |= {name: torch.full(shape, 9, dtype=torch.uint8) for name, shape in (images or {}).items()}
    episode = Episode(task, seed, success, False, 2.5, 5)
    about = {"split": "validate", "instruction": "push it", "step": 6, "env": None, "env_index": 0, "row": 0} | info
    return Trajectory.of(leaves(images), final, episode, **about)
