"""``ManiSkillEnvs``: the tasks of ManiSkill 3 that run with what comes in its wheel."""

from __future__ import annotations

import difflib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_async.envs.base import EnvFactory
from vla_async.envs.maniskill_simulator import NO_VULKAN, ManiSkillSimulator, build_env
from vla_async.envs.maniskill_tasks import NEEDS_DOWNLOAD, ROBOTS, TASKS, Task

# The cheapest call that needs a Vulkan device; it runs in a process of its own, for Vulkan does not survive a fork.
_PROBE = "import sapien; sapien.render.RenderMaterial()"
_SET_HERE = (
    "obs_mode", "control_mode", "reward_mode", "sim_backend", "render_backend", "num_envs", "enhanced_determinism",
    "robot_uids", "sensor_configs", "render_mode", "human_render_camera_configs",
)  # fmt: skip


@dataclass(kw_only=True)
class ManiSkillEnvs(EnvFactory):
    """One task of ManiSkill 3, as ``num_envs`` processes on CPUs or as one batch on a GPU.

    Settings that may be None are filled in on construction with what the task or its robot has by default.

    Args:
        task: name of the task, for example ``PushCube-v1`` (:data:`vla_async.envs.maniskill_tasks.TASKS`).
        obs: ``state`` is the full state, object poses included; ``rgb`` is the cameras, what the robot feels of itself and
            the goal where the task names one; ``rgb+state`` is the cameras and the full state.
        image_size: height and width of each image.
        cameras: the first becomes ``image``, the others keep their names; the task's own camera by default.
        control_mode: ManiSkill's name of the controller, which fixes the meaning and the number of the actions.
        robot: a robot that the task supports.
        reward: ``dense`` is ManiSkill's ``normalized_dense``, at most about 1 per env step; ``sparse`` is 1 at a success.
        sim_backend: ``physx_cpu`` steps one env per process; ``physx_cuda`` (or ``physx_cuda:1``) all of them in one.
        render_backend: ``auto``, or a name that ManiSkill knows (``cpu``, ``gpu``, ``cuda:1``, a PCI address).
        max_episode_steps: the horizon in env steps; by default the one that ManiSkill registers the task with.
        env_kwargs: further arguments of the ManiSkill env, for example ``sim_config``.
    """

    task: str
    obs: Literal["state", "rgb", "rgb+state"] = "state"
    image_size: int = 128
    cameras: Sequence[str] | None = None
    control_mode: str | None = None
    robot: str | None = None
    reward: Literal["dense", "sparse"] = "dense"
    sim_backend: str = "physx_cpu"
    render_backend: str = "auto"
    max_episode_steps: int | None = None  # type: ignore[assignment] # filled in before anyone reads it
    env_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task = _task(self.task)
        if self.max_episode_steps is None:
            self.max_episode_steps = task.horizon
        super().__post_init__()
        self._check_robot(task)
        self._check_observation(task)
        self._check_backend(task)
        if self.reward not in ("dense", "sparse"):
            raise ValueError(f"env.reward={self.reward!r}: choose dense or sparse")
        if self.reward == "dense" and not task.dense:
            raise ValueError(f"env.reward='dense': {self.task} has no dense reward; set env.reward to sparse")
        if taken := sorted(set(self.env_kwargs) & set(_SET_HERE)):
            raise ValueError(f"env.env_kwargs may not hold {', '.join(taken)}: the other settings of env decide them")

    def _check_robot(self, task: Task) -> None:
        if self.robot is None:
            self.robot = task.robots[0]
        if self.robot not in task.robots:
            raise ValueError(f"env.robot={self.robot!r} cannot do {self.task}; choose {_listed(task.robots)}")
        modes = ROBOTS[self.robot].control_modes
        if self.control_mode is None:
            self.control_mode = task.control_mode if task.control_mode in modes else modes[0]
        if self.control_mode not in modes:
            raise ValueError(
                f"env.control_mode={self.control_mode!r} is not one of the robot {self.robot}; choose {_listed(modes)}"
            )

    def _check_observation(self, task: Task) -> None:
        if self.obs not in ("state", "rgb", "rgb+state"):
            raise ValueError(f"env.obs={self.obs!r}: choose state, rgb or rgb+state")
        if self.image_size < 1:
            raise ValueError(f"env.image_size={self.image_size} must be at least 1")
        if self.obs == "state":
            if self.cameras:
                raise ValueError(f"env.cameras={list(self.cameras)} has no effect on env.obs='state'; set rgb or rgb+state")
            self.cameras = ()
            return
        if not task.cameras:
            raise ValueError(f"env.obs={self.obs!r}: {self.task} has no camera; set env.obs to state")
        choices = (*task.cameras, *ROBOTS[str(self.robot)].cameras)
        self.cameras = task.cameras[:1] if self.cameras is None else tuple(self.cameras)
        if not self.cameras or len(set(self.cameras)) < len(self.cameras) or not set(self.cameras) <= set(choices):
            raise ValueError(
                f"env.cameras={list(self.cameras)} must be different cameras of {self.task} with the robot {self.robot}: "
                f"{_listed(choices)}"
            )

    def _check_backend(self, task: Task) -> None:
        if not re.fullmatch(r"physx_cpu|physx_cuda(:\d+)?", self.sim_backend):
            raise ValueError(f"env.sim_backend={self.sim_backend!r}: choose physx_cpu, physx_cuda or physx_cuda:INDEX")
        if not self.is_batched:
            return
        if not task.batched:
            raise ValueError(
                f"env.sim_backend={self.sim_backend!r}: in {self.task} an env that starts an episode disturbs the others; "
                "use physx_cpu"
            )
        if self.env_kwargs.get("reconfiguration_freq"):
            raise ValueError("env.env_kwargs.reconfiguration_freq rebuilds all envs at once; leave it out with physx_cuda")

    @property
    def task_names(self) -> list[str]:
        return [self.task]

    @property
    def is_batched(self) -> bool:
        return self.sim_backend != "physx_cpu"

    @property
    def image_names(self) -> dict[str, str]:
        """The cameras by the name that their images have in an observation."""
        return {"image" if position == 0 else name: name for position, name in enumerate(self.cameras or ())}

    @property
    def observation_names(self) -> frozenset[str]:
        return frozenset(["state", *self.image_names])

    def make_simulator(self, index: int, render: bool = False) -> ManiSkillSimulator:
        return ManiSkillSimulator(build_env(self, render), self)

    def check(self) -> None:
        """Look for ManiSkill, a Vulkan device and, for a batch, a CUDA device.

        Raises:
            RuntimeError: names what is missing and how to install it.
        """
        if importlib.util.find_spec("mani_skill") is None:
            raise RuntimeError("ManiSkill is not installed: pip install 'vla_async[maniskill]'")
        if self.is_batched:
            import torch

            index, found = int(self.sim_backend.partition(":")[2] or 0), torch.cuda.device_count()
            if index >= found:
                raise RuntimeError(
                    f"env.sim_backend={self.sim_backend!r} needs CUDA device {index}, of {found} found; or use physx_cpu"
                )
        probe = subprocess.run([sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if probe.returncode:
            said = probe.stderr.strip().splitlines()[-1:] or [f"exit status {probe.returncode}"]
            raise RuntimeError(f"{NO_VULKAN} ({said[0]})")


def _task(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    if name in NEEDS_DOWNLOAD:
        raise ValueError(
            f"env.task={name!r} needs files that ManiSkill would download; these tasks do not: {_listed(TASKS)}"
        )
    close = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"env.task={name!r} is no task of ManiSkill that is known here; {hint}choose {_listed(TASKS)}")


def _listed(names: Any) -> str:
    return ", ".join(names)
