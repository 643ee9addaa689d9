"""``ToyEnvs``: TorchRL's ToyVLAEnv, for runs of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torchrl.envs.custom import ToyVLAEnv

from vla_async.envs.base import EnvFactory, SimStep, Simulator

_INSTRUCTION = "move the marker onto the target"


class ToySimulator(Simulator):
    """``num_rows`` independent copies of ToyVLAEnv in its tracking mode, each with its own random stream.

    Attributes:
        seeds: int64 ``[N]``, the seed of the episode that each row is in.
        elapsed: int64 ``[N]``, the env steps since each row's reset.
    """

    def __init__(self, factory: ToyEnvs, num_rows: int, render: bool) -> None:
        self.factory, self.num_rows = factory, num_rows
        self.action_low, self.action_high = (-1.0,) * factory.action_dim, (1.0,) * factory.action_dim
        self._envs = [
            ToyVLAEnv(
                action_dim=factory.action_dim,
                state_dim=2 * factory.action_dim,
                image_shape=(3, factory.image_size, factory.image_size),
                instruction=_INSTRUCTION,
                success_steps=factory.success_steps,
                success_tol=factory.success_tol,
                from_pixels=render,
            )
            for _ in range(num_rows)
        ]
        self._last = [env.reset() for env in self._envs]
        self.seeds, self.elapsed = (torch.zeros(num_rows, dtype=torch.int64) for _ in range(2))

    @property
    def instructions(self) -> Sequence[str]:
        return [_INSTRUCTION] * self.num_rows

    @property
    def tasks(self) -> Sequence[str]:
        return self.factory.task_names * self.num_rows

    @property
    def targets(self) -> Tensor:
        """Where the marker of each row should go, ``[N, A]``, whether or not an observation shows it."""
        return torch.stack([td["observation", "state"][self.factory.action_dim :] for td in self._last])

    def _observation(self) -> dict[str, Tensor]:
        names = sorted(self.factory.observation_names)
        return {name: torch.stack([td["observation", name] for td in self._last]) for name in names}

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        self.seeds = torch.where(rows, seeds, self.seeds)
        self.elapsed = torch.where(rows, 0, self.elapsed)
        for row in torch.nonzero(rows).flatten().tolist():
            self._envs[row].set_seed(int(seeds[row]))
            self._last[row] = self._envs[row].reset()
        return self._observation()

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        self.elapsed = self.elapsed + rows
        reward, success = torch.zeros(self.num_rows), torch.zeros(self.num_rows, dtype=torch.bool)
        for row in torch.nonzero(rows).flatten().tolist():
            # ToyVLAEnv's own `_step` skips TorchRL's bookkeeping, which costs more than the env itself
            self._last[row] = self._envs[row]._step(self._last[row].set("action", action[row]))
            reward[row], success[row] = self._last[row]["reward"].item(), self._last[row]["success"].item()
        if self.factory.reward == "sparse":
            reward = success.to(torch.float32)
        return SimStep(self._observation(), reward, success)

    def render(self) -> Tensor:
        if not self._envs[0].from_pixels:
            return super().render()
        frame: Tensor = self._last[0]["pixels"]
        return frame


@dataclass(kw_only=True)
class ToyEnvs(EnvFactory):
    """Move a marker onto a target that the state shows: learnable in seconds, with no simulator to install.

    Args:
        action_dim: A; the state is the last action and the target, so its length is 2 A.
        obs: what the policy sees. The image is noise, as a stand-in for a camera; only the state tells the target.
        image_size: height and width of the image.
        success_steps: env steps in a row that the action must stay near the target.
        success_tol: how near, per action element.
        reward: ``dense`` is minus the distance to the target, ``sparse`` is 1 at a success.
        batched: step all envs as rows of one simulator, as a GPU simulator does.
    """

    max_episode_steps: int = 20
    action_dim: int = 2
    obs: Literal["state", "rgb", "rgb+state"] = "state"
    image_size: int = 16
    success_steps: int = 2
    success_tol: float = 0.15
    reward: Literal["dense", "sparse"] = "dense"
    batched: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.obs not in ("state", "rgb", "rgb+state"):
            raise ValueError(f"env.obs={self.obs!r}: choose state, rgb or rgb+state")
        if self.reward not in ("dense", "sparse"):
            raise ValueError(f"env.reward={self.reward!r}: choose dense or sparse")
        if self.action_dim < 1:
            raise ValueError(f"env.action_dim={self.action_dim} must be at least 1")
        if self.image_size < 1:
            raise ValueError(f"env.image_size={self.image_size} must be at least 1")
        if not 0.0 < self.success_tol <= 0.5:
            raise ValueError(f"env.success_tol={self.success_tol} must be in (0, 0.5]: targets lie in [-0.5, 0.5]")
        if not 1 <= self.success_steps <= self.max_episode_steps:
            raise ValueError(
                f"env.success_steps={self.success_steps} must be from 1 to env.max_episode_steps={self.max_episode_steps}"
            )

    @property
    def task_names(self) -> list[str]:
        return ["toy-tracking"]

    @property
    def observation_names(self) -> frozenset[str]:
        return frozenset({"rgb": "image"}.get(name, name) for name in self.obs.split("+"))

    @property
    def is_batched(self) -> bool:
        return self.batched

    def make_simulator(self, index: int, render: bool = False) -> ToySimulator:
        return ToySimulator(self, self.num_envs if self.batched else 1, render)
