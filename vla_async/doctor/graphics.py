"""What pictures are drawn with: the simulators' system libraries, Vulkan, EGL and OSMesa."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from vla_async.doctor import vulkan as vulkan_program
from vla_async.doctor.apart import Ended, run_apart
from vla_async.doctor.check import Check
from vla_async.doctor.libraries import LIBRARIES, MESA_NEEDED, MESA_PACKAGE, loads, mesa_of

_TIMEOUT_S = 20.0
_NO_ROOT = "without root: ask the administrator for them, or for a container image that has them"
_MESA = ".".join(map(str, MESA_NEEDED))
_VULKAN_FIX = (
    f"with an NVIDIA GPU: sudo apt-get install libvulkan1 (in a container, NVIDIA_DRIVER_CAPABILITIES=all); without one, "
    f"Mesa {_MESA} or newer draws in software: sudo apt-get install libvulkan1 {MESA_PACKAGE} (Debian 12: "
    f"{MESA_PACKAGE}/bookworm-backports); {_NO_ROOT}"
)
_GL_FIX = f"sudo apt-get install libegl1 libegl-mesa0, or libosmesa6, which needs no driver; {_NO_ROOT}"


def system_libraries(simulators: Collection[str], needed: bool, there: Callable[[str], bool] = loads) -> Check:
    """The shared libraries that simulators load.

    Args:
        simulators: of ``maniskill`` and ``libero``, those that are installed.
        needed: whether the recipe uses one of them.
        there: whether a library loads.
    """
    missing = [
        library for library in LIBRARIES if not there(library.soname) and not any(there(name) for name in library.instead)
    ]
    if "maniskill" not in simulators:
        missing = [library for library in missing if library.soname != "libvulkan.so.1"]
    if not missing or not simulators:
        found = "all that the simulators load" if simulators else "no simulator is installed that needs any"
        return Check("system libraries", "ok", found, needed=needed)
    packages = " ".join(library.packages[-1] for library in missing)
    found = f"missing: {', '.join(library.soname for library in missing)}"
    fix = f"make setup, or sudo apt-get install {packages}; {_NO_ROOT}"
    return Check("system libraries", "fail", found, fix, needed)


def vulkan(needed: bool, run: Callable[[Sequence[str], float], Ended] = run_apart) -> Check:
    """The devices that ManiSkill can draw with, and makes its materials by even where nothing is drawn.

    Args:
        needed: whether the recipe uses ManiSkill.
        run: runs the program that asks for them: drivers may crash.
    """
    ended = run(["-I", "-S", str(Path(vulkan_program.__file__))], _TIMEOUT_S)
    if ended.problem:
        return Check("Vulkan", "fail", f"its drivers fail when asked for devices: {ended.problem}", _VULKAN_FIX, needed)
    devices: list[dict[str, Any]] = json.loads(ended.output)
    listed = ", ".join(f"{'software' if device['is_cpu'] else 'GPU'}: {device['driver']}" for device in devices)
    if any(not device["is_cpu"] or mesa_of(device["driver"]) >= MESA_NEEDED for device in devices):
        return Check("Vulkan", "ok", listed, needed=needed)
    found = f"{listed}, older than Mesa {_MESA}" if devices else "no device: the loader (libvulkan1) or a driver is missing"
    return Check("Vulkan", "fail", found, _VULKAN_FIX, needed)


def offscreen_gl(needed: bool, egl: dict[int, int | None], there: Callable[[str], bool] = loads) -> Check:
    """What MuJoCo draws LIBERO's cameras with.

    Args:
        needed: whether the recipe uses LIBERO.
        egl: the EGL devices that work, with CUDA's number of each.
        there: whether a library loads.
    """
    devices = [f"EGL device {index}" + ("" if cuda is None else f" (CUDA {cuda})") for index, cuda in egl.items()]
    osmesa = ["OSMesa"] if there("libOSMesa.so.8") else []
    if devices or osmesa:
        return Check("EGL, OSMesa", "ok", ", ".join([*devices, *osmesa]), needed=needed)
    return Check("EGL, OSMesa", "fail", "neither works, so MuJoCo cannot draw", _GL_FIX, needed)
