"""environment.json says what a run ran on, and nothing about whose machine it was."""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vla_async.monitor import environment as module
from vla_async.monitor.environment import environment, nvidia_driver, usable_cores, write_environment


def test_it_says_what_a_run_ran_on(tmp_path: Path) -> None:
    """Whoever compares two runs looks here first; a missing version or core count would be guessed."""
    write_environment(tmp_path)
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found == environment()
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["cpu"]["usable_cores"] <= len(os.sched_getaffinity(0))
    assert found["memory_mib"] > 0
    assert set(found["gpus"]) == {"torch_cuda", "driver", "devices"}


def test_the_names_of_the_machine_and_of_its_user_are_left_out(tmp_path: Path) -> None:
    """A report is handed on; who ran it where is nobody's business."""
    words = json.dumps(environment()).replace('"', " ").split()
    assert platform.node() not in words
    assert getpass.getuser() not in words
    assert not any(word.startswith("/") for word in words)


def test_no_package_is_imported_for_its_version() -> None:
    """Importing a simulator takes seconds, and a broken one would end the run."""
    before = set(sys.modules)
    environment()
    assert not {"mani_skill", "libero", "transformers"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1.5), ("max 100000", 4.0), ("800000 100000", 4.0), (None, 4.0)], ids=str
)
def test_a_container_may_have_fewer_cores_than_it_sees(
    quota: str | None, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throughput is read against the cores that were there to use, not those that the machine has."""
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(module, "_lines", lambda path: [] if quota is None else [quota])
    assert usable_cores() == cores


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert module.git_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert module.git_commit() is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build", "560.35.03"),
        ("GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)", None),
    ],
)
def test_the_driver_is_found_in_what_its_module_says(line: str, version: str | None) -> None:
    assert nvidia_driver([line]) == version
