"""A stand-in for a ManiSkill env of N rows, with its manners: one buffer for everything, and forgetful controllers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vla_async.envs import ManiSkillEnvs


class FakeAgent:
    """Two controllers, one of which has a target that lasts from step to step."""

    def __init__(self, rows: int) -> None:
        self.target = torch.zeros(rows, 2)

    def get_controller_state(self) -> dict[str, Any]:
        return {"arm": {"target_qpos": self.target}}

    def set_controller_state(self, state: dict[str, Any]) -> None:
        self.target = state["arm"]["target_qpos"]


class FakeManiSkill:
    """Row ``i`` succeeds at its env step ``2 + i``; its position starts at its seed and moves with its actions."""

    def __init__(self, factory: ManiSkillEnvs, render: bool = False) -> None:
        self.factory, self.num_envs, self.device = factory, factory.num_envs, torch.device("cpu")
        self.unwrapped, self.agent = self, FakeAgent(factory.num_envs)
        box = SimpleNamespace(low=torch.full((2,), -1.0).numpy(), high=torch.ones(2).numpy(), shape=(2,))
        self.single_action_space: Any = box
        if factory.robot == "two_panda_wristcam":
            self.single_action_space = SimpleNamespace(spaces={"left": box, "right": box})
        self.render_mode = "rgb_array" if render else None
        self.reading, self.reads = False, 0
        self.elapsed_steps = torch.zeros(self.num_envs, dtype=torch.int32)
        self.position = torch.zeros(self.num_envs, 2)
        self.resets: list[tuple[list[int], list[int]]] = []
        self.closed = False
        self._state = torch.zeros(self.num_envs, 3)
        self._flags = torch.zeros(self.num_envs, dtype=torch.bool)
        self._reward = torch.zeros(self.num_envs, dtype=torch.float64)

    def _info(self) -> dict[str, Any]:
        self._flags[:] = self.elapsed_steps == torch.arange(2, 2 + self.num_envs)
        return {"success": self._flags, "fail": self.elapsed_steps == 9}

    def reset(self, seed: list[int], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        index: Tensor = options["env_idx"]
        self.resets.append((list(seed), index.tolist()))
        self.position[index] = torch.tensor(seed, dtype=torch.float32)[index].unsqueeze(-1).expand(-1, 2)
        self.elapsed_steps[index] = 0
        self.agent.target[:] = self.position
        return {}, self._info()

    def step(self, action: Any) -> tuple[Any, Tensor, None, None, dict[str, Any]]:
        if isinstance(action, dict):
            action = action["left"] + action["right"]
        self.position += action
        self.agent.target = self.agent.target + 2 * action  # a controller's target is ahead of where the arm is
        self.elapsed_steps += 1
        self._reward[:] = self.elapsed_steps
        return {}, self._reward, None, None, self._info()

    def get_obs(self, info: dict[str, Any]) -> Any:
        assert self.reading, "the observation was computed although nobody asked for it"
        self.reads += 1
        self._state[:] = torch.cat([self.position, self.elapsed_steps.unsqueeze(-1)], dim=-1)
        size = self.factory.image_size
        rgb = self.elapsed_steps.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, size, size, 3)
        pictures = {name: {"rgb": rgb + shift} for shift, name in enumerate(self.factory.cameras or ())}
        if self.factory.obs == "state":
            return self._state
        if self.factory.obs == "rgb+state":
            return {"state": self._state, "sensor_data": pictures}
        extra = {"tcp_pose": self.position, "bin_pos": self.position + 1000}
        return {"agent": {"qpos": self.position}, "extra": extra, "sensor_data": pictures}

    def render(self) -> Tensor:
        return torch.zeros(self.num_envs, 4, 5, 3, dtype=torch.uint8)

    def close(self) -> None:
        self.closed = True
