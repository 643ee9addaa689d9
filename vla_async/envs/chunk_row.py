"""``ChunkRow``: the rules of :class:`ChunkedEnv` for a simulator of one row on the CPU, in plain numbers.

A rollout process steps one row at a time on a core that has just done something else. What counts there is how much code a
step touches: an operation on a tensor of one element takes some 30 microseconds then, a plain number none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_async.envs.chunked import ChunkedEnv, check_actions


@dataclass(slots=True)
class RowStep:
    """What one decision did. The names are those of :class:`vla_async.envs.ChunkStep`.

    Attributes:
        observation: by name, each ``[1, ...]``; the simulator may change it with its next step or reset.
        step_rewards: of the executed env steps.
        success: after the last of them.
        success_once: at any env step of the episode so far.
        terminated: whether the task is over.
        truncated: whether the horizon was reached.
    """

    observation: Mapping[str, Tensor]
    step_rewards: list[float]
    success: bool
    success_once: bool
    terminated: bool
    truncated: bool


class ChunkRow:
    """Executes decisions on the simulator of an env that has one row on the CPU.

    Args:
        env: gives the simulator and the rules. Its own ``step_chunk`` must not be used beside this; its ``reset_rows`` is.
    """

    def __init__(self, env: ChunkedEnv) -> None:
        self.env, self.simulator = env, env.simulator
        self._low = np.array(self.simulator.action_low, np.float32)
        self._high = np.array(self.simulator.action_high, np.float32)
        chunk = torch.zeros(1, env.chunk_size, len(self._low))
        self._clipped: NDArray[Any] = chunk[0].numpy()
        self._actions, self._all = list(chunk.unbind(1)), torch.ones(1, dtype=torch.bool)
        self.begin()

    def begin(self) -> None:
        """Note that the simulator was reset."""
        self._elapsed, self._success_once = 0, False

    def step(self, chunk: NDArray[np.float32]) -> RowStep:
        """Execute one decision.

        Args:
            chunk: ``[H, A]``; elements outside the action bounds are clipped to them.

        Raises:
            ValueError: if an action is not finite; names the first one.
        """
        if not all(map(math.isfinite, chunk.ravel().tolist())):
            check_actions(torch.from_numpy(chunk)[None])
        np.maximum(chunk, self._low, out=self._clipped)
        np.minimum(self._clipped, self._high, out=self._clipped)
        env, rewards = self.env, list[float]()
        terminated = truncated = False
        for action in self._actions:
            result = self.simulator.step(action, self._all)
            rewards.append(result.reward.item())
            self._elapsed += 1
            success = bool(result.success)
            self._success_once |= success
            terminated = success and env.on_success == "terminate"
            terminated |= result.failure is not None and bool(result.failure)
            truncated = not terminated and self._elapsed >= env.max_episode_steps
            if terminated or truncated:
                break
        if env.on_success == "finish_chunk" and self._success_once:
            terminated, truncated = True, False
        return RowStep(result.observation, rewards, success, self._success_once, terminated, truncated)
