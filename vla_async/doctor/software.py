"""What is installed: Python, torch with CUDA, the packages, loggers, a video encoder."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vla_async.doctor.check import Check, Status
from vla_async.monitor.environment import nvidia_driver

LEAST_PYTHON, FIRST_UNTESTED_PYTHON = (3, 10), (3, 13)
_NVIDIA = Path("/proc/driver/nvidia/version")
_FFMPEG_TIMEOUT_S = 10.0
# the packages of Lightning's loggers, any of which will do
_LOGGER_PACKAGES = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow",),
    "CometLogger": ("comet_ml",),
    "NeptuneLogger": ("neptune",),
}


def python(version: tuple[int, int], executable: str = sys.executable) -> Check:
    """The interpreter."""
    found = f"{version[0]}.{version[1]}, {executable}"
    if version < LEAST_PYTHON:
        fix = "make a virtual environment with Python 3.11 or 3.12: make setup PYTHON=/path/to/python3.12"
        return Check("Python", "fail", found, fix)
    if version >= FIRST_UNTESTED_PYTHON:
        fix = "the pinned versions of constraints.txt are for 3.11 and 3.12: make setup PYTHON=/path/to/python3.12"
        return Check("Python", "warn", found, fix)
    return Check("Python", "ok", found)


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself.

    Attributes:
        version: of torch; empty if it cannot be imported.
        cuda: the version of CUDA that it is built for; None for a build without.
        devices: the names of the CUDA devices that it can use.
        driver: the version of NVIDIA's driver; None without one.
        problem: what went wrong.
    """

    version: str = ""
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    driver: str | None = None
    problem: str = ""

    @classmethod
    def look(cls) -> TorchFacts:
        """Those of this process."""
        driver = nvidia_driver(_NVIDIA.read_text(errors="replace").splitlines()) if _NVIDIA.is_file() else None
        try:
            import torch
        except (ImportError, OSError) as error:
            return cls(driver=driver, problem=str(error))
        devices, problem = list[str](), ""
        if torch.version.cuda is not None and driver is not None:
            try:
                torch.cuda.init()
                devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
            except (RuntimeError, AssertionError) as error:  # what a driver that is too old ends in
                problem = str(error).strip().splitlines()[0]
        return cls(torch.__version__, torch.version.cuda, tuple(devices), driver, problem)


def torch_and_cuda(facts: TorchFacts, wants_cuda: bool) -> Check:
    """Torch, and whether its CUDA goes with the driver.

    Args:
        facts: what torch says.
        wants_cuda: whether the recipe asks for a CUDA device.
    """
    name = "torch"
    if not facts.version:
        return Check(name, "fail", f"cannot be imported: {facts.problem}", "pip install 'torch>=2.8'")
    found = f"{facts.version}, built " + ("without CUDA" if facts.cuda is None else f"for CUDA {facts.cuda}")
    found += "" if facts.driver is None else f"; driver {facts.driver}"
    if facts.devices:
        return Check(name, "ok", f"{found}; {len(facts.devices)} × {facts.devices[0]}")
    status: Status = "fail" if wants_cuda else "warn"
    install = "pip install --force-reinstall torch, from the index for its CUDA: https://pytorch.org/get-started/locally"
    if facts.driver is not None and facts.cuda is None:
        return Check(name, status, f"{found}: the GPU goes unused", install)
    if facts.driver is not None:
        fix = (
            f"the driver must be at least that of CUDA {facts.cuda}: ask the administrator for a newer one, or {install}. "
            "If it is new enough, look whether CUDA_VISIBLE_DEVICES hides the devices"
        )
        return Check(name, status, f"{found}: no device can be used ({facts.problem or 'none is visible'})", fix)
    if wants_cuda:
        fix = "set trainer.accelerator=cpu; or, in a container, start it with the GPUs (docker run --gpus all)"
        return Check(name, "fail", f"{found}; no NVIDIA driver", fix)
    return Check(name, "ok", f"{found}; no GPU")


def installed_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_requirements() -> list[str]:
    """What vla_async asks for, extras with their marker; nothing if it runs without being installed."""
    try:
        return metadata.requires("vla_async") or []
    except metadata.PackageNotFoundError:
        return []


def packages(requirements: Sequence[str], installed: Callable[[str], str | None] = installed_version) -> Check:
    """The packages of the core have to be there; those of extras, where they are, have to be new enough.

    Args:
        requirements: as in the package's metadata.
        installed: the version of a distribution, None if it is not there.
    """
    from packaging.requirements import Requirement

    name, missing, odd, right = "packages", list[str](), list[str](), 0
    if not requirements:
        return Check(name, "warn", "vla_async runs without being installed, so its packages are not known", "pip install .")
    for text in requirements:
        requirement = Requirement(text)
        is_core = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        version = installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            right += 1
        elif is_core:
            missing.append(f"{requirement.name}{requirement.specifier}")
        elif version is not None:
            odd.append(f"{requirement.name}{requirement.specifier} (not {version})")
    if missing:
        fix = f"pip install {' '.join(repr(wanted) for wanted in missing)}"
        return Check(name, "fail", f"missing, or of another version: {', '.join(missing)}", fix)
    if odd:
        fix = f"pip install {' '.join(repr(wanted.partition(' ')[0]) for wanted in odd)}, if you use them"
        return Check(name, "warn", f"other versions than supported: {', '.join(odd)}", fix)
    return Check(name, "ok", f"{right} of the packages that vla_async and its extras ask for, all of supported versions")


def is_importable(name: str) -> bool:
    """Whether there is such a module, without importing it."""
    return importlib.util.find_spec(name) is not None


def loggers(class_paths: Iterable[str], importable: Callable[[str], bool] = is_importable) -> list[Check]:
    """The loggers that a recipe names, a check each.

    Args:
        class_paths: of their classes.
        importable: whether there is a module of that name.
    """
    found = []
    for path in class_paths:
        module, _, kind = path.rpartition(".")
        wanted = _LOGGER_PACKAGES.get(kind, ())
        name = f"logger {kind}"
        if wanted and not any(map(importable, wanted)):
            found.append(Check(name, "fail", f"{wanted[0]} is not installed", f"pip install {wanted[0]}"))
            continue
        try:
            getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError) as error:
            fix = f"install what it needs, or take {kind} out of trainer.loggers"
            found.append(Check(name, "fail", f"{path} cannot be imported: {error}", fix))
        else:
            found.append(Check(name, "ok", path))
    return found


def find_ffmpeg() -> str:
    """The encoder that videos are written with.

    Raises:
        RuntimeError: if there is none, or it does not run.
    """
    import imageio_ffmpeg

    path: str = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        command = [path, "-version"]
        subprocess.run(command, capture_output=True, check=True, timeout=_FFMPEG_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{path} does not run: {error}") from None
    return path


def ffmpeg(needed: bool, find: Callable[[], str] = find_ffmpeg) -> Check:
    """What writes videos.

    Args:
        needed: whether the recipe records some.
        find: returns where it is, or raises ImportError or RuntimeError.
    """
    try:
        return Check("ffmpeg", "ok", find(), needed=needed)
    except (ImportError, RuntimeError) as error:
        fix = "pip install imageio-ffmpeg (it brings its own), or sudo apt-get install ffmpeg"
        fix += "; without videos: evaluate_loop.num_videos=0" if needed else ""
        return Check("ffmpeg", "fail", str(error).strip().splitlines()[0], fix, needed)
