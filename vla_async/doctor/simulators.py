"""Simulators, really stepped: each in a process of its own, with a time limit."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from vla_async.doctor.apart import Ended, run_apart
from vla_async.doctor.check import Check

if TYPE_CHECKING:
    from vla_async.envs import EnvFactory, EnvSpec

TIMEOUT_S = 180.0  # LIBERO takes 11 s on an idle machine, an env of a batch of thousands a minute
Run = Callable[[list[str], float, bytes], Ended]
_MODULES = {"maniskill": ("mani_skill",), "libero": ("libero",)}
_CRASH = (
    "its native code failed, mostly that which draws: see the lines on Vulkan, and on EGL and OSMesa (MUJOCO_GL=osmesa "
    "draws LIBERO without a driver)"
)


def installed_simulators() -> list[str]:
    """Those of ``maniskill`` and ``libero`` that are there, found without importing them."""
    return [name for name, modules in _MODULES.items() if all(importlib.util.find_spec(module) for module in modules)]


def examples() -> dict[str, EnvFactory]:
    """A small env with a picture of each simulator."""
    from vla_async.envs import LiberoEnvs, ManiSkillEnvs, ToyEnvs

    return {
        "toy": ToyEnvs(num_envs=1, obs="rgb+state"),
        "maniskill": ManiSkillEnvs(task="PushCube-v1", num_envs=1, obs="rgb+state", image_size=64),
        "libero": LiberoEnvs(num_envs=1, task_ids=[0], image_size=64),
    }


def stepped(name: str, factory: EnvFactory, needed: bool, run: Run = run_apart) -> tuple[Check, EnvSpec | None]:
    """Let an env make a step.

    Args:
        name: of the check.
        factory: makes the env.
        needed: whether the recipe cannot do without.
        run: runs the program that steps it.

    Returns:
        The check, and what the env is like; None if that is not known.
    """
    from vla_async.envs import EnvSpec

    ended = run(["-m", "vla_async.doctor.stepping"], TIMEOUT_S, pickle.dumps(factory))
    lines = [line for line in ended.output.splitlines() if line.startswith("{")]
    if not lines:
        fix = _CRASH if ended.crashed else "see what it says; VLA_ASYNC_DEBUG=1 vla-async fit ... shows all of it"
        return Check(name, "fail", f"{type(factory).__name__} cannot be stepped: {ended.problem}", fix, needed), None
    said = json.loads(lines[-1])
    if "error" in said:
        found, _, fix = said["error"].partition(": ")
        return Check(name, "fail", found if fix else said["error"], fix or "see docs/install.md", needed), None
    found = f"{type(factory).__name__}: built and reset in {said['build_s']:.1f} s, stepped in {said['step_s']:.2f} s"
    spec = EnvSpec.from_dict(said["spec"])
    if said["blank"]:
        fix = "the driver draws nothing: see the lines on Vulkan, and on EGL and OSMesa"
        return Check(name, "warn", f"{found}, but the picture of {', '.join(said['blank'])} is blank", fix, needed), spec
    if ended.problem:
        return Check(name, "warn", f"{found}, but when it ended, {ended.problem}", _CRASH, needed), spec
    return Check(name, "ok", found, needed=needed), spec
