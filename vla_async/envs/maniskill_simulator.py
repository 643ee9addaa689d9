"""``ManiSkillSimulator``: one ManiSkill env, on a CPU or as a batch on a GPU, behind :class:`vla_async.envs.Simulator`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vla_async.envs.base import SimStep, Simulator
from vla_async.envs.maniskill_tasks import TASKS

if TYPE_CHECKING:
    from vla_async.envs.maniskill import ManiSkillEnvs

VIDEO_SIZE = 256  # height and width of a rendered picture
NO_VULKAN = (
    "ManiSkill finds no Vulkan device, which it needs even without images. With an NVIDIA driver, install libvulkan1. "
    "Without a GPU, install libvulkan1 and Mesa's software driver, 24.3 or newer: on Ubuntu `apt install libvulkan1 "
    "mesa-vulkan-drivers`; on Debian 12 enable bookworm-backports, then `apt install libvulkan1` and "
    "`apt install -t bookworm-backports mesa-vulkan-drivers`"
)


class ManiSkillSimulator(Simulator):
    """Steps a ManiSkill env.

    An observation is computed when it is read: rendering a picture costs more than the physics of an env step, and inside
    a chunk nobody looks at it.

    On a CPU a seed gives the same initial state as ManiSkill's own ``env.reset(seed=seed)``. On a GPU the seed of a row
    gives that row's initial state, whatever its companions do (:mod:`vla_async.envs.maniskill_rows`); what ManiSkill
    builds once per row (PegInsertionSide's geometry) stays with the row, and contacts (``is_grasped``) in the first
    observation of an episode are those of the row's last env step.

    Args:
        env: the ManiSkill env, built by :func:`build_env`; ``simulator.env.unwrapped`` is open to scripted controllers.
        factory: the settings that it was built from.

    Attributes:
        seeds: int64 ``[N]``, the seed of the episode that each row is in.
    """

    def __init__(self, env: Any, factory: ManiSkillEnvs) -> None:
        self.env, self.factory = env, factory
        self.num_rows, self.device = int(env.num_envs), torch.empty(0, device=env.device).device  # "cuda" becomes "cuda:0"
        self._task = TASKS[factory.task]
        space = env.single_action_space
        self._parts: dict[str, int] | None = None  # several robots: the action of each, side by side
        boxes = [space]
        if hasattr(space, "spaces"):
            boxes = list(space.spaces.values())
            self._parts = {name: part.shape[0] for name, part in space.spaces.items()}
        self.action_low = tuple(np.concatenate([box.low for box in boxes]).tolist())
        self.action_high = tuple(np.concatenate([box.high for box in boxes]).tolist())
        self.seeds = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        self.names = ("state", *factory.image_names)
        self._never = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        self._tick = 0

    @property
    def instructions(self) -> Sequence[str]:
        return [self._task.instruction] * self.num_rows

    @property
    def tasks(self) -> Sequence[str]:
        return [self.factory.task] * self.num_rows

    @property
    def elapsed(self) -> Tensor:
        """The env steps since each row's reset, ``[N]``."""
        steps: Tensor = self.env.elapsed_steps
        return steps

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        self._tick += 1
        self.seeds = torch.where(rows, seeds, self.seeds)
        info = self._reset_some(rows) if self.factory.is_batched else self._reset_only()
        return self.read(info)

    def _reset_only(self) -> Any:
        seed = int(self.seeds)
        _, info = self.env.reset(seed=seed)
        if not info["reconfigure"]:
            # contact forces are those of the last physics step: take one in the new scene, then set it up again
            self.env.scene.step()
            _, info = self.env.reset(seed=seed)
        return info

    def _reset_some(self, rows: Tensor) -> Any:
        agent = self.env.agent
        before = _map(torch.clone, agent.get_controller_state())
        _, info = self.env.reset(seed=self.seeds.tolist(), options={"env_idx": torch.nonzero(rows).flatten()})
        if before:
            # ManiSkill lets the controllers of all rows forget their targets
            agent.set_controller_state(_map(lambda new, old: _choose(rows, new, old), agent.get_controller_state(), before))
        return info

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        self._tick += 1
        _, reward, _, _, info = self.env.step(self._split(action))
        success, failure = info.get("success", self._never), info.get("fail")
        return SimStep(Observation(self, info), reward.to(torch.float32), success, failure)

    def _split(self, action: Tensor) -> Any:
        if self._parts is None:
            return action
        return dict(zip(self._parts, action.split(list(self._parts.values()), dim=-1), strict=True))

    def read(self, info: Any) -> dict[str, Tensor]:
        """The observation of the state that the env is in now, by name, each ``[N, ...]``."""
        with _reading(self.env):
            raw = self.env.get_obs(info)
        if self.factory.obs == "state":
            return {"state": raw.to(torch.float32)}
        images = {
            name: raw["sensor_data"][camera]["rgb"].permute(0, 3, 1, 2).contiguous()
            for name, camera in self.factory.image_names.items()
        }
        if self.factory.obs == "rgb+state":
            return {"state": raw["state"].to(torch.float32)} | images
        extra = {name: value for name, value in raw["extra"].items() if name not in self._task.privileged}
        return {"state": torch.cat([*_leaves(raw["agent"]), *_leaves(extra)], dim=-1)} | images

    def render(self) -> Tensor:
        if self.env.render_mode is None:
            return super().render()
        frame: Tensor = self.env.render()[0]
        return frame

    def close(self) -> None:
        self.env.close()


class Observation(Mapping[str, Tensor]):
    """An observation that is computed when its first leaf is read, before the simulator moves on.

    Raises:
        RuntimeError: when it is first read after the next env step or reset.
    """

    def __init__(self, simulator: ManiSkillSimulator, info: Any) -> None:
        self._simulator, self._info, self._tick = simulator, info, simulator._tick
        self._leaves: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._simulator.names:
            raise KeyError(name)
        if self._leaves is None:
            if self._tick != self._simulator._tick:
                raise RuntimeError("an observation has to be read before the simulator's next step or reset")
            self._leaves = self._simulator.read(self._info)
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._simulator.names)

    def __len__(self) -> int:
        return len(self._simulator.names)


def build_env(factory: ManiSkillEnvs, render: bool) -> Any:
    """The ManiSkill env that the settings describe, without gymnasium's wrappers: no time limit, no automatic reset.

    Raises:
        RuntimeError: if there is no Vulkan device.
    """
    try:
        with quiet():
            return _build(factory, render)
    except RuntimeError as error:
        if "rendering device" in str(error):
            raise RuntimeError(NO_VULKAN) from error
        raise


def _build(factory: ManiSkillEnvs, render: bool) -> Any:
    import mani_skill.envs  # registers the tasks
    import sapien
    from mani_skill.utils.registration import REGISTERED_ENVS

    from vla_async.envs.maniskill_rows import row_seeded

    mani_skill.logger.setLevel(logging.ERROR)  # resets that rebuild the scene would warn again and again
    sapien.set_log_level("error")
    registered, task = REGISTERED_ENVS[factory.task], TASKS[factory.task]
    drawn = render or task.drawn or bool(factory.image_names)
    env_class = deferring(row_seeded(registered.cls) if factory.is_batched else registered.cls)
    settings: dict[str, Any] = dict(registered.default_kwargs) | {
        "obs_mode": factory.obs,
        "control_mode": factory.control_mode,
        "reward_mode": {"dense": "normalized_dense", "sparse": "sparse"}[factory.reward],
        "sim_backend": factory.sim_backend,
        "render_backend": _render_backend(factory) if drawn else "none",
        "num_envs": factory.num_envs if factory.is_batched else 1,
        "enhanced_determinism": factory.is_batched,
    }
    if task.rebuilt and not factory.is_batched:
        settings["reconfiguration_freq"] = 1
    if factory.robot != task.robots[0]:
        settings["robot_uids"] = factory.robot
    if factory.image_names:
        settings["sensor_configs"] = {"width": factory.image_size, "height": factory.image_size}
    if render:
        settings["render_mode"] = "rgb_array"
        settings["human_render_camera_configs"] = {"width": VIDEO_SIZE, "height": VIDEO_SIZE}
    env = env_class(**settings | factory.env_kwargs)
    env.cameras = frozenset(factory.image_names.values())
    return env


def _render_backend(factory: ManiSkillEnvs) -> str:
    if factory.render_backend != "auto":
        return factory.render_backend
    return factory.sim_backend.replace("physx_", "") if factory.is_batched else "gpu" if torch.cuda.is_available() else "cpu"


def deferring(env_class: Any) -> Any:
    """A ManiSkill env class whose ``step`` and ``reset`` leave the observation out until :func:`_reading` asks for it."""

    class Deferring(env_class):  # type: ignore[misc, unused-ignore]
        reading = False
        cameras: frozenset[str] = frozenset()

        def get_obs(self, info: Any = None, unflattened: bool = False) -> Any:
            if not self.reading:
                return {}
            for name in self._sensors.keys() - self.cameras:
                del self._sensors[name]  # a camera that nobody looks through would be drawn all the same
            return super().get_obs(info, unflattened)

        def _flatten_raw_obs(self, obs: Any) -> Any:
            return super()._flatten_raw_obs(obs) if self.reading else obs

    Deferring.__name__ = env_class.__name__
    return Deferring


@contextmanager
def _reading(env: Any) -> Iterator[None]:
    env.reading = True
    try:
        yield
    finally:
        env.reading = False


@contextmanager
def quiet() -> Iterator[None]:
    """Without the Python warnings that ManiSkill and its dependencies raise at import and construction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _leaves(tree: Any) -> list[Tensor]:
    """The leaves of a nested dict, in order, as float32 ``[N, D]``."""
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    return [tree.reshape(len(tree), -1).to(torch.float32)]


def _map(function: Any, *trees: Any) -> Any:
    """``function`` of the matching leaves of nested dicts, as a nested dict."""
    if isinstance(trees[0], Mapping):
        return {name: _map(function, *(tree[name] for tree in trees)) for name in trees[0]}
    return function(*trees)


def _choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
