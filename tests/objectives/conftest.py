"""Trajectories with chosen numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from vla_async import keys

MakeTrajectory = Callable[..., TensorDict]


@pytest.fixture
def trajectory() -> MakeTrajectory:
    """Builds one trajectory ``[1, T]`` from plain lists, without an end unless told."""

    def build(
        step_rewards: list[list[float]],
        values: list[float],
        next_values: list[float],
        *,
        executed: list[list[int]] | None = None,
        terminated: tuple[int, ...] = (),
        truncated: tuple[int, ...] = (),
    ) -> TensorDict:
        T, H = len(step_rewards), len(step_rewards[0])
        ends = {"terminated": terminated, "truncated": truncated}
        flags = {name: torch.tensor([[[t in at] for t in range(T)]]) for name, at in ends.items()}
        td = TensorDict({}, batch_size=[1, T])
        td[keys.STEP_REWARDS] = torch.tensor([step_rewards])
        td[keys.EXECUTED] = torch.tensor([executed or [[1] * H] * T], dtype=torch.bool)
        td[keys.REWARD] = (td[keys.STEP_REWARDS] * td[keys.EXECUTED]).sum(-1, keepdim=True)
        td[keys.VALUE] = torch.tensor([values]).unsqueeze(-1)
        td[keys.NEXT_VALUE] = torch.tensor([next_values]).unsqueeze(-1)
        td[keys.TERMINATED], td[keys.TRUNCATED] = flags["terminated"], flags["truncated"]
        td[keys.DONE] = flags["terminated"] | flags["truncated"]
        return td

    return build
