"""Run directories, and finding a checkpoint in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vla_async.run_directory import RunDirectory, resolve_checkpoint


def test_every_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """Two runs of the same second must not write into each other."""
    runs = [RunDirectory.create(tmp_path, "name") for _ in range(12)]
    assert len({run.path for run in runs}) == 12
    assert all(run.path.parent == tmp_path / "name" and run.path.is_dir() for run in runs)
    assert runs[0].checkpoints == runs[0].path / "checkpoints"
    assert runs[0].videos == runs[0].path / "videos"
    assert runs[0].trajectories == runs[0].path / "trajectories"


def test_a_run_says_what_ran_and_on_what(tmp_path: Path) -> None:
    """Without its configuration or its versions, nobody can repeat it."""
    run = RunDirectory.create(tmp_path, "name")
    run.describe(None)
    assert json.loads((run.path / "environment.json").read_text())["vla_async"]
    assert not (run.path / "config.yaml").exists()
    run.describe("trainer: {}\n")
    assert (run.path / "config.yaml").read_text() == "trainer: {}\n"


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The message must name the setting, not only the system call."""
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"trainer.root_dir='.*file' cannot be written to"):
        RunDirectory.create(tmp_path / "file", "name")


def make(root: Path, run: str, checkpoint: str, age: int) -> Path:
    path = root / "name" / run / "checkpoints" / f"{checkpoint}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


def test_last_and_best_are_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    """A newer run that was cut short before its first checkpoint must not hide the older ones."""
    make(tmp_path, "2026-01-01_00-00-00", "last", age=30)
    best = make(tmp_path, "2026-01-02_00-00-00", "best", age=20)
    last = make(tmp_path, "2026-01-02_00-00-00-10", "last", age=10)
    make(tmp_path, "2026-01-02_00-00-00-9", "last", age=15)
    (tmp_path / "name" / "2026-01-03_00-00-00").mkdir()
    make(tmp_path / "other", "2026-01-04_00-00-00", "last", age=0)
    assert resolve_checkpoint("last", tmp_path, "name") == last
    assert resolve_checkpoint("best", tmp_path, "name") == best


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """Whatever it is called."""
    path = make(tmp_path, "run", "odd name", age=0)
    assert resolve_checkpoint(path, tmp_path / "elsewhere", "name") == path
    assert resolve_checkpoint(str(path), tmp_path / "elsewhere", "name") == path


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """Say where was looked and what may be given."""
    with pytest.raises(FileNotFoundError, match=r"ckpt_path=best: no run under .*name has checkpoints/best.ckpt yet"):
        resolve_checkpoint("best", tmp_path, "name")
    with pytest.raises(FileNotFoundError, match="ckpt_path='lats' is not a file; give a file, or last or best"):
        resolve_checkpoint("lats", tmp_path, "name")
