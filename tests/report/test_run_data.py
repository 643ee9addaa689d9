"""Reading a run directory: what is found by a name, what belongs where, and what is said of files that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.report.runs import COMMAND, evaluation, update, write_run
from vla_async.refusals import ConfigError
from vla_async.report.run_data import find_run, read_run


def test_lines_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    """An evaluation beside training has a line of its own, one in turn shares the update's."""
    first = {name: value for name, value in evaluation(0, 0.1).items() if name not in ("env_steps", "elapsed_s")}
    lines = [first, update(1, rollout__success_once=0.2), update(2) | evaluation(2, 0.5)]
    run = read_run(write_run(tmp_path / "a" / "1", lines, f"# {COMMAND}\n# vla_async==0.1.0\ntrainer:\n  name: a\n"))
    assert [line["step"] for line in run.updates] == [1, 2]
    assert [(line["step"], line["env_steps"], line["elapsed_s"]) for line in run.evaluations] == [(0, 0, 0), (2, 1000, 3)]
    assert (run.name, run.command, run.config) == ("a/1", COMMAND, {"trainer": {"name": "a"}})


def test_a_run_without_the_other_files_is_read_too(tmp_path: Path) -> None:
    """Runs from Python have no config.yaml, old ones no environment.json."""
    run = read_run(write_run(tmp_path / "1", [update(1)]))
    assert (run.command, run.config, run.environment, run.timeline, run.videos) == ("", {}, {}, None, [])


@pytest.mark.parametrize("end", ["3", "3,2e", "3,25"])
def test_an_unfinished_last_line_is_read_as_far_as_it_goes(tmp_path: Path, end: str) -> None:
    """What a killed run leaves must not cost the rest of it, and a number that lost its end must not be taken for one."""
    path = write_run(tmp_path / "1", [update(1), update(2)])
    (path / "metrics.csv").write_text(f"step,lr\n1,0.1\n2,0.2\n{end}")
    assert [line.get("lr") for line in read_run(path).updates] == [0.1, 0.2]


def test_a_run_is_found_by_its_directory_its_parent_and_its_name(tmp_path: Path) -> None:
    old, new = (write_run(tmp_path / "toy" / time, [update(1)]) for time in ("2026-01-31_12-00-00", "2026-01-31_12-00-01"))
    os.utime(old / "metrics.csv", (1, 1))
    assert find_run(str(old)) == old
    assert find_run(str(tmp_path / "toy")) == new
    assert find_run("toy", tmp_path) == new


def test_a_run_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write_run(tmp_path / "toy" / "1", [update(1)])
    with pytest.raises(ConfigError, match=r"no run in ty nor .*\n  runs below .*: toy"):
        find_run("ty", tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.csv", "step,lr\n1,0.1\n2,yes\n"),
        ("metrics.csv", "\xff"),
        ("config.yaml", "a: [1"),
        ("config.yaml", "\xff"),
        ("environment.json", "{"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = write_run(tmp_path / "1", [update(1)])
    (path / name).write_text(text, encoding="latin1")
    with pytest.raises(ConfigError, match=name):
        read_run(path)
