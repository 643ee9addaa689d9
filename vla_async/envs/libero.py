"""``LiberoEnvs``: the five LIBERO suites on TorchRL's ``LiberoWrapper``, with their official initial states."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_async.envs.base import EnvFactory, SimStep, Simulator
from vla_async.envs.libero_camera import Camera, LazyObservation, prepare_context
from vla_async.envs.libero_install import (
    build_libero_env,
    choose_gl,
    installed_task_names,
    instruction_of,
    libero_paths,
    load_init_states,
)
from vla_async.rng import fold

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
CameraName = Literal["agentview", "robot0_eye_in_hand", "frontview", "birdview", "sideview", "robot0_robotview"]

NUM_TASKS: dict[str, int] = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
NUM_INIT_STATES = 50  # of every task
# horizons of the public evaluation protocols: a little more than the longest demonstration of each suite
_HORIZONS: dict[str, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
_ACTION_DIM = 7
_MIN_VIDEO_SIZE = 128


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, which LIBERO draws from, and put it back."""
    import numpy as np

    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def axis_angle(state: Tensor) -> Tensor:
    """The state with the hand's rotation as an axis times an angle in [0, 2 pi], not as a quaternion: ``[8]`` of ``[9]``."""
    position, vector, real, fingers = state.double().split([3, 3, 1, 2])
    real = real.clamp(-1.0, 1.0)
    sine = (1.0 - real.square()).sqrt()
    turned = torch.where(sine > 0.0, vector * 2.0 * real.arccos() / sine, 0.0)
    return torch.cat([position, turned, fingers]).to(state.dtype)


class LiberoSimulator(Simulator):
    """One LIBERO task.

    A reset keeps the built scene (robosuite's ``hard_reset=False``), which reaches the same state, bit for bit, as building
    it anew, in a fraction of the time. It is a function of the initial state's index alone: LIBERO draws the places of
    fixtures (a cabinet, a stove), which the official states do not hold, from a generator that is seeded with the index.

    Args:
        factory: what to build.
        index: which env; it decides the task.
        render: make :meth:`render` return pictures of at least 128 × 128 pixels.
    """

    action_low, action_high = (-1.0,) * _ACTION_DIM, (1.0,) * _ACTION_DIM

    def __init__(self, factory: LiberoEnvs, index: int, render: bool) -> None:
        from torchrl.envs.libs.libero import LiberoWrapper

        self.factory = factory
        self.task = factory.task_names[index % len(factory.task_names)]
        paths, size, fast = libero_paths(), factory.image_size, factory.render_quality == "fast"
        views = {"image": factory.camera} | ({"wrist_image": factory.wrist_camera} if factory.wrist_camera else {})
        gl, device = choose_gl(factory.mujoco_gl, factory.device_of(index))
        with _numpy_seed(0):
            self.env: Any = build_libero_env(
                gl,
                device,
                bddl_file_name=str(paths["bddl_files"] / factory.suite / f"{self.task}.bddl"),
                camera_names=list(dict.fromkeys(views.values())),
                camera_heights=size,
                camera_widths=size,
                hard_reset=False,
                ignore_done=True,  # the horizon is ours
            )
            prepare_context(self.env.sim, max(size, _MIN_VIDEO_SIZE), fast)
            self._cameras = {key: Camera(self.env.sim, view, size, fast) for key, view in views.items()}
            for key, view in views.items():
                self._replace_sensor(f"{view}_image", self._cameras[key])
            self._wrapper = LiberoWrapper(
                self.env,
                instruction=instruction_of(self.task),
                init_states=load_init_states(paths["init_states"] / factory.suite / f"{self.task}.pruned_init"),
                init_state_mode="fixed",
                camera=factory.camera,
                wrist_camera=factory.wrist_camera,
                max_episode_steps=None,
                settle_steps=factory.settle_steps,
            )
        too_small = render and size < _MIN_VIDEO_SIZE
        self._video = Camera(self.env.sim, factory.camera, _MIN_VIDEO_SIZE, fast) if too_small else None
        model = self.env.sim.model
        self._fixtures = model.body_pos.copy(), model.body_quat.copy()
        # an OpenGL context that outlives the interpreter's EGL ends in error messages
        atexit.register(_close_forgotten, weakref.ref(self))

    def _replace_sensor(self, name: str, camera: Camera) -> None:
        def sensor(cache: object) -> Any:
            return camera.capture()

        sensor.__modality__ = "image"  # type: ignore[attr-defined] # robosuite's mark of a sensor
        self.env.env.modify_observable(observable_name=name, attribute="sensor", modifier=sensor)

    @property
    def instructions(self) -> Sequence[str]:
        return [self._wrapper.instruction]

    @property
    def tasks(self) -> Sequence[str]:
        return [self.task]

    def _observe(self, td: TensorDict) -> LazyObservation:
        state = td["observation", "state"]
        state = (axis_angle(state) if self.factory.rotation == "axis_angle" else state).unsqueeze(0)
        leaves: dict[str, Callable[[], Tensor]] = {"state": lambda: state}
        for key, camera in self._cameras.items():
            leaves[key] = lambda camera=camera: self._upright(camera).unsqueeze(0)  # type: ignore[misc]
        return LazyObservation(leaves)

    def _upright(self, camera: Camera) -> Tensor:
        """The camera's picture as LiberoWrapper turns it, uint8 ``[3, size, size]``."""
        picture: Tensor = self._wrapper._read_image(camera.picture())
        return picture

    def reset(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        """Start an episode from the official initial state that the seed stands for, and let it settle."""
        index = self.factory.init_state_index(int(seeds[0]))
        # what robosuite's own reset leaves as the last episode had it
        model = self.env.sim.model
        model.body_pos[:], model.body_quat[:] = self._fixtures
        for robot in self.env.robots:
            robot.gripper.current_action = 0.0 * robot.gripper.current_action
        self._wrapper.init_state_id = index
        with _numpy_seed(index):
            return dict(self._observe(self._wrapper._reset()))

    def step(self, action: Tensor, rows: Tensor) -> SimStep:
        # LiberoWrapper's own `_step` skips TorchRL's bookkeeping, and goes on after a success
        td = self._wrapper._step(TensorDict({"action": action[0]}))
        return SimStep(self._observe(td), td["reward"], td["success"])

    def render(self) -> Tensor:
        """The picture of the policy's camera; drawn once if the observation holds it, else anew for a larger one."""
        if self._video is not None:
            self._video.capture()
        return self._upright(self._video or self._cameras["image"]).permute(1, 2, 0)

    def close(self) -> None:
        """Free the simulation and its render context. Harmless if called again."""
        if self.env is not None:
            self.env.sim._render_context_offscreen.gl_ctx.make_current()
            self._cameras, self._video = {}, None
            self._wrapper.close()
            self.env = None


def _close_forgotten(reference: weakref.ref[LiberoSimulator]) -> None:
    if (simulator := reference()) is not None:
        simulator.close()


@dataclass(kw_only=True)
class LiberoEnvs(EnvFactory):
    """LIBERO: a Panda arm at a table, moved by 7 numbers in [-1, 1]: 6 of the hand's pose, then the gripper (-1 opens).

    The policy sees ``"image"`` and, if asked for, ``"wrist_image"``, uint8 ``[3, S, S]``, upright, and ``"state"``, float32
    ``[9]`` or ``[8]``: position and rotation of the hand, positions of both fingers. The reward is 1 at every env step that
    ends in success, else 0. Needs the extra ``libero``, and EGL or OSMesa.

    Args:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
        task_ids: tasks of the suite by official number; env ``i`` runs ``task_ids[i % len(task_ids)]``. None takes the
            whole suite, so that it takes at least as many envs as tasks to run all of them at once.
        max_episode_steps: the horizon in env steps; None takes the suite's from the public evaluation protocols.
        camera: what ``"image"`` shows.
        wrist_camera: what ``"wrist_image"`` shows, usually ``robot0_eye_in_hand``; None leaves it out.
        rotation: how the state gives the hand's rotation: as a ``quaternion``, or as ``axis_angle``, the axis times the
            angle, which is what public models were trained on.
        image_size: height and width of the images.
        render_quality: ``official`` pictures are the benchmark's, bit for bit. ``fast`` leaves out reflections and
            smooths edges in a cheaper way: about a third of the time on a CPU, but not what others train and evaluate on.
        init_state_mode: how a seed picks one of the 50 official initial states: ``random`` hashes it, ``cycle`` takes it
            modulo 50 (so 50 consecutive seeds meet each state once), ``fixed`` always takes ``init_state_id``.
        init_state_id: the state of ``init_state_mode="fixed"``.
        group_repeats: that many consecutive seeds share an initial state (a GRPO group is ``seed // group_repeats``).
        settle_steps: env steps in which the arm holds still after a reset until all objects lie at rest.
        mujoco_gl: ``egl``, ``osmesa``, or ``auto``, which takes ``MUJOCO_GL`` if it is set, else EGL if it works.
        render_gpu_device_id: EGL's index of the device that draws, not CUDA's; ``python -m vla_async.envs.egl_devices``
            lists both. Of a list, env ``i`` takes entry ``i % len``. None takes the first device that works.
    """

    suite: Suite = "libero_spatial"
    task_ids: list[int] | None = None
    max_episode_steps: int | None = None  # type: ignore[assignment] # a number after construction, as in the base class
    camera: CameraName = "agentview"
    wrist_camera: CameraName | None = None
    rotation: Literal["quaternion", "axis_angle"] = "quaternion"
    image_size: int = 128
    render_quality: Literal["official", "fast"] = "official"
    init_state_mode: Literal["random", "cycle", "fixed"] = "random"
    init_state_id: int = 0
    group_repeats: int = 1
    settle_steps: int = 10
    mujoco_gl: Literal["auto", "egl", "osmesa"] = "auto"
    render_gpu_device_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "wrist_camera" and value is None):
                raise ValueError(f"env.{name}={value!r}: choose one of {', '.join(choices)}")
        if self.max_episode_steps is None:
            self.max_episode_steps = _HORIZONS[self.suite]
        super().__post_init__()
        wrong = [task for task in self.task_ids or [] if not 0 <= task < NUM_TASKS[self.suite]]
        if wrong or self.task_ids == []:
            raise ValueError(
                f"env.task_ids={self.task_ids}: {self.suite} has tasks 0 to {NUM_TASKS[self.suite] - 1}; null takes all"
            )
        for name, least, most in (
            ("image_size", 8, 4096),
            ("init_state_id", 0, NUM_INIT_STATES - 1),
            ("group_repeats", 1, None),
            ("settle_steps", 0, None),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                raise ValueError(f"env.{name}={value} must be at least {least}" + (f" and at most {most}" if most else ""))
        if self.wrist_camera == self.camera:
            raise ValueError(f"env.wrist_camera={self.wrist_camera} is env.camera already; choose another, or null for none")
        if self.render_gpu_device_id == []:
            raise ValueError("env.render_gpu_device_id=[] names no device; name one, or null for the first that works")

    @property
    def task_names(self) -> list[str]:
        """The benchmark's own names; ``suite/number`` where LIBERO is not installed."""
        known = installed_task_names(self.suite) or [f"{self.suite}/{task}" for task in range(NUM_TASKS[self.suite])]
        return known if self.task_ids is None else [known[task] for task in self.task_ids]

    @property
    def observation_names(self) -> frozenset[str]:
        return frozenset({"state", "image"} | ({"wrist_image"} if self.wrist_camera else set()))

    def init_state_index(self, seed: int) -> int:
        """The official initial state, in ``[0, 50)``, that an episode of this seed starts from."""
        group = seed // self.group_repeats
        if self.init_state_mode == "fixed":
            return self.init_state_id
        return (group if self.init_state_mode == "cycle" else fold("libero", group)) % NUM_INIT_STATES

    def device_of(self, index: int) -> int | None:
        """EGL's index of the device that draws for env ``index``, or None for the first that works."""
        devices = self.render_gpu_device_id
        return devices[index % len(devices)] if isinstance(devices, list) else devices

    def check(self) -> None:
        libero_paths()
        for index in range(self.num_envs if isinstance(self.render_gpu_device_id, list) else 1):
            choose_gl(self.mujoco_gl, self.device_of(index))

    def make_simulator(self, index: int, render: bool = False) -> LiberoSimulator:
        return LiberoSimulator(self, index, render)


_CHOICES: dict[str, tuple[str, ...]] = {
    "suite": get_args(Suite),
    "camera": get_args(CameraName),
    "wrist_camera": get_args(CameraName),
    "rotation": ("quaternion", "axis_angle"),
    "render_quality": ("official", "fast"),
    "init_state_mode": ("random", "cycle", "fixed"),
    "mujoco_gl": ("auto", "egl", "osmesa"),
}
