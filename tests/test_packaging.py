"""The package as it is installed, and the set-up script as a state machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions, entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import vla_async

ROOT = Path(__file__).parents[1]
# not matplotlib, rich and mujoco: Lightning and TorchRL import those themselves
HEAVY = ("mani_skill", "sapien", "libero", "robosuite", "gymnasium", "imageio")
SET_UP_EXTRAS = {"maniskill", "libero", "vla", "dev", "docs"}


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(number) for name, number in (line.split("==") for line in lines)}


def test_the_version_has_one_source() -> None:
    """The installed metadata's version comes from `vla_async.__version__`, not from a second copy in pyproject.toml."""
    assert version("vla_async") == vla_async.__version__
    assert not re.search(r"^version\s*=\s*\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_type_information_is_shipped() -> None:
    assert (ROOT / "vla_async" / "py.typed").is_file()
    assert 'vla_async = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


def test_the_console_script_is_installed() -> None:
    """`vla-async` on a user's PATH is `vla_async.__main__:main`."""
    [script] = entry_points(group="console_scripts", name="vla-async")
    assert script.value == "vla_async.__main__:main"
    assert callable(script.load())


def test_importing_the_library_loads_no_simulator_and_no_plotting() -> None:
    """Every worker process imports the library: what only one of them needs must not cost all of them."""
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "vla_async").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_installed_versions_are_the_pinned_ones() -> None:
    """The tests run on what constraints.txt names, so that its names are known to work together."""
    pinned = pins()
    installed = {canonicalize_name(dist.name): Version(dist.version) for dist in distributions()}
    different = {
        name: (str(installed[name]), str(number))
        for name, number in pinned.items()
        if name in installed and Version(installed[name].public) != number
    }
    assert different == {}


def test_all_that_the_set_up_installs_is_pinned() -> None:
    """An unpinned dependency would let a new release break a fresh clone. A GPU build's own libraries follow torch's pin."""
    pinned, seen, waiting = pins(), set(), [("vla_async", frozenset(SET_UP_EXTRAS))]
    while waiting:
        name, extras = waiting.pop()
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another platform or Python, or a GPU build's
        for requirement in map(Requirement, requirements):
            wanted = any(
                requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}
            )
            entry = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if wanted and entry not in seen:
                seen.add(entry)
                waiting.append(entry)
    ours = {name for name, _ in seen if not re.match(r"nvidia-|triton|cuda", name)}
    assert ours - set(pinned) - {"setuptools", "pip"} == set()
    assert len(ours) > 50


# ------------------------------------------------------------------------------------------------ scripts/setup.sh

FAKE_PYTHON = """#!/usr/bin/env bash
# stands in for python3 and for the virtual environment's python; writes down what it is asked to do
case "$*" in
    "-c pass" | "-c import ensurepip, venv" | "-c import sys"*) exit 0 ;;
esac
echo "$*" >>"$CALLS"
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip"*) exit "${PIP_STATUS:-0}" ;;
    *system_libraries.py) exit "${LIBRARIES_STATUS:-0}" ;;
esac
"""


class Project:
    """A copy of what the set-up script reads, with a fake Python."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root / "project", root / "calls"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = root / "python3"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def set_up(self, **environment: str) -> tuple[int, list[str]]:
        """Run the script; returns its exit status and what the fake Pythons were asked to do."""
        self.calls.write_text("")
        environment = {**os.environ, "PYTHON": str(self.python), "CALLS": str(self.calls), **environment}
        status = subprocess.run(["bash", "scripts/setup.sh"], cwd=self.root, env=environment, capture_output=True).returncode
        return status, self.calls.read_text().splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def kinds(calls: list[str]) -> list[str]:
    return [next(kind for kind in ("system_libraries", "venv", "pip") if kind in call) for call in calls]


def test_a_first_set_up_does_everything_and_a_second_only_looks(project: Project) -> None:
    status, calls = project.set_up()
    assert (status, kinds(calls)) == (0, ["system_libraries", "venv", "pip"])
    assert "-c constraints.txt -e .[maniskill,libero,vla,dev,docs]" in calls[-1]
    status, calls = project.set_up()
    assert (status, kinds(calls)) == (0, ["system_libraries"])


def test_an_interrupted_set_up_starts_again_from_nothing(project: Project) -> None:
    """Half-installed packages must not be taken for installed."""
    assert project.set_up(PIP_STATUS="1")[0] != 0
    (project.root / ".venv" / "half-installed").touch()
    status, calls = project.set_up()
    assert (status, kinds(calls)) == (0, ["system_libraries", "venv", "pip"])
    assert not (project.root / ".venv" / "half-installed").exists()
    assert kinds(project.set_up()[1]) == ["system_libraries"]


def test_changed_pins_are_installed_into_the_venv_that_is_there(project: Project) -> None:
    project.set_up()
    with (project.root / "constraints.txt").open("a") as file:
        file.write("another-package==1.0\n")
    assert kinds(project.set_up()[1]) == ["system_libraries", "pip"]
    assert kinds(project.set_up()[1]) == ["system_libraries"]


def test_a_venv_that_the_user_made_is_kept(project: Project) -> None:
    (project.root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(project.python, project.root / ".venv" / "bin" / "python")
    (project.root / ".venv" / "the-users").touch()
    status, calls = project.set_up()
    assert (status, kinds(calls)) == (0, ["system_libraries", "pip"])
    assert (project.root / ".venv" / "the-users").exists()


def test_a_venv_whose_python_is_gone_is_made_anew(project: Project) -> None:
    """An upgrade of the system's Python leaves a virtual environment whose interpreter does not start."""
    project.set_up()
    (project.root / ".venv" / "bin" / "python").unlink()
    assert kinds(project.set_up()[1]) == ["system_libraries", "venv", "pip"]


def test_missing_system_libraries_stop_the_set_up(project: Project) -> None:
    status, calls = project.set_up(LIBRARIES_STATUS="1")
    assert status != 0
    assert kinds(calls) == ["system_libraries"]


def test_an_unsuitable_python_is_refused_with_a_way_out(project: Project) -> None:
    """Too old, too new or missing: the message says which is needed and how to name it."""
    result = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=project.root,
        env={**os.environ, "PYTHON": "/nonexistent/python3"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Python 3.11 or 3.12 is needed" in result.stderr
    assert "PYTHON=" in result.stderr


def test_two_set_ups_at_once_make_one_venv(project: Project) -> None:
    """`make demo` and `make test` in two terminals: the second waits for the first."""
    environment = {**os.environ, "PYTHON": str(project.python), "CALLS": str(project.calls)}
    both = [subprocess.Popen(["bash", "scripts/setup.sh"], cwd=project.root, env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert kinds(project.calls.read_text().splitlines()).count("pip") == 1
