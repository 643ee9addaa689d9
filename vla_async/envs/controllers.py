"""Scripted controllers: they look into the simulator and solve a task, to collect demonstrations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from vla_async.envs.base import Simulator
from vla_async.envs.maniskill_simulator import ManiSkillSimulator
from vla_async.envs.toy import ToySimulator
from vla_async.rng import normal


class ScriptedController(ABC):
    """Acts in an env from what it sees inside its simulator. Picklable, for each env worker gets a copy."""

    @abstractmethod
    def reset(self, simulator: Simulator) -> None:
        """Called when some rows have started an episode.

        Raises:
            ValueError: if the controller cannot act in this simulator; names the setting to change.
        """

    @abstractmethod
    def act(self, simulator: Simulator) -> Tensor:
        """The action of every row for the next env step, float32 ``[N, A]``."""


class NoisyController(ScriptedController):
    """A controller that remembers nothing from one env step to the next, with noise so that demonstrations vary.

    A subclass implements :meth:`plan`. Rows may start their episodes at any time.

    Args:
        noise_std: standard deviation of the noise on each action element, a function of the episode's seed and env step.

    Raises:
        ValueError: for a negative ``noise_std``.
    """

    def __init__(self, noise_std: float = 0.0) -> None:
        if noise_std < 0:
            raise ValueError(f"controller.noise_std={noise_std} must not be negative")
        self.noise_std = noise_std

    @abstractmethod
    def plan(self, simulator: Any) -> Tensor:
        """The action of every row without noise, float32 ``[N, A]``."""

    def spread(self, action: Tensor) -> Tensor:
        """How far noise of 1 may lead each element of a planned action away, to be multiplied with ``[N, A]``."""
        return torch.ones_like(action)

    def act(self, simulator: Simulator) -> Tensor:
        """The planned action with noise, within the action bounds."""
        action = self.plan(simulator)
        if self.noise_std:
            assert isinstance(simulator, ToySimulator | ManiSkillSimulator)  # `reset` has refused others
            keys = simulator.seeds + ((simulator.elapsed.to(torch.int64) + 1) << 32)
            action = action + self.noise_std * self.spread(action) * normal(keys, action.shape[-1])
        low, high = (action.new_tensor(bound) for bound in (simulator.action_low, simulator.action_high))
        return torch.clamp(action, low, high)


class ToyController(NoisyController):
    """Puts the marker of :class:`vla_async.envs.ToyEnvs` onto the target."""

    def reset(self, simulator: Simulator) -> None:
        if not isinstance(simulator, ToySimulator):
            raise ValueError(f"ToyController acts in ToyEnvs, not in a {type(simulator).__name__}")

    def plan(self, simulator: ToySimulator) -> Tensor:
        return simulator.targets


class PandaController(NoisyController):
    """Base of the controllers that move the gripper of one Panda arm, with ``control_mode: pd_ee_delta_pos``.

    A subclass names its ``task`` and implements :meth:`move`.
    """

    task: ClassVar[str]
    reach: ClassVar[float] = 0.1  # metres that an action element of 1 asks for

    def reset(self, simulator: Simulator) -> None:
        name = type(self).__name__
        if not isinstance(simulator, ManiSkillSimulator):
            raise ValueError(f"{name} acts in ManiSkillEnvs, not in a {type(simulator).__name__}")
        wanted = {"task": self.task, "robot": "panda", "control_mode": "pd_ee_delta_pos"}
        for setting, value in wanted.items():
            if getattr(simulator.factory, setting) != value:
                raise ValueError(f"{name} needs env.{setting}={value}, not {getattr(simulator.factory, setting)}")

    @abstractmethod
    def move(self, env: Any) -> tuple[Tensor, Tensor]:
        """Where to go from here.

        Args:
            env: the ManiSkill env.

        Returns:
            The wanted displacement of the gripper in metres ``[N, 3]``, and whether it opens, bool ``[N]``.
        """

    def plan(self, simulator: ManiSkillSimulator) -> Tensor:
        displacement, opens = self.move(simulator.env.unwrapped)
        fingers = opens.to(torch.float32) * 2 - 1
        # scaled as a whole, for an element cut at its bound would bend the way
        steps = displacement / self.reach
        steps = steps / steps.abs().amax(-1, keepdim=True).clamp(min=1.0)
        return torch.cat([steps, fingers.unsqueeze(-1)], dim=-1)

    def spread(self, action: Tensor) -> Tensor:
        """In proportion to the motion, so that a grasp stays precise; the fingers are left alone."""
        motion = action[:, :3].abs().amax(-1, keepdim=True).expand(-1, 3)
        return torch.nn.functional.pad(motion, (0, 1))


class PushCubeController(PandaController):
    """Goes behind the cube with closed fingers, down to the table, and pushes it onto the target."""

    task = "PushCube-v1"

    def move(self, env: Any) -> tuple[Tensor, Tensor]:
        gripper, cube = env.agent.tcp.pose.p, env.obj.pose.p
        start = cube - cube.new_tensor([0.07, 0.0, 0.0])
        away = torch.linalg.norm((start - gripper)[:, :2], dim=-1)
        low, aligned = gripper[:, 2] < 0.05, (cube - gripper)[:, 1].abs() < 0.015
        behind = cube[:, 0] - gripper[:, 0] > 0.02
        pushes = low & aligned & behind
        goal = torch.where(away.unsqueeze(-1) < 0.02, start, start + start.new_tensor([0.0, 0.0, 0.08]))
        goal = torch.where(pushes.unsqueeze(-1), cube + cube.new_tensor([0.05, 0.0, 0.0]), goal)
        return goal - gripper, torch.zeros_like(low)


class PickCubeController(PandaController):
    """Goes above the cube with open fingers, down to it, grasps it and carries it to the goal."""

    task = "PickCube-v1"

    def move(self, env: Any) -> tuple[Tensor, Tensor]:
        gripper, cube, goal = env.agent.tcp_pose.p, env.cube.pose.p, env.goal_site.pose.p
        grasped = env.agent.is_grasping(env.cube)
        away = torch.linalg.norm((cube - gripper)[:, :2], dim=-1)
        arrived = torch.linalg.norm(cube - gripper, dim=-1) < 0.012
        above = cube + cube.new_tensor([0.0, 0.0, 0.08])
        target = torch.where((away < 0.01).unsqueeze(-1), cube, above)
        displacement = torch.where(grasped.unsqueeze(-1), goal - cube, target - gripper)
        return displacement, ~(grasped | arrived)
