"""Episodes in the report: in which order, and no more than there is room for."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.report.runs import update, write_run
from vla_async.report.columns import SampledRun, sampled
from vla_async.report.media import gallery
from vla_async.report.run_data import read_run


def recorded(tmp_path: Path, name: str = "a") -> SampledRun:
    path = write_run(tmp_path / name / "1", [update(1)])
    for folder, stems in {
        "videos": ("validate_000000_lift_up_7_failure", "validate_000030_lift_up_7_success", "strange"),
        "trajectories/lift_up": ("train_000010_5_success", "train_000010_6_failure", "validate_000030_7_failure"),
    }.items():
        (path / folder).mkdir(parents=True)
        for stem in stems:
            (path / folder / f"{stem}.mp4").write_bytes(b"x" * 300)
            if folder != "videos":
                (path / folder / f"{stem}.pt").touch()
    (path / "trajectories/lift_up/train_000010_5_success.mp4").unlink()
    return sampled([read_run(path)])[0]


def test_the_last_evaluation_and_failures_come_first(tmp_path: Path) -> None:
    shown = gallery([recorded(tmp_path)], 1e6)
    assert [(clip.task, clip.verdict) for clip in shown.evaluations] == [
        ("lift_up", "success"),
        ("lift_up", "failure"),
        ("strange", ""),
    ]
    assert shown.evaluations[0].about == "validate, after 30 updates, seed 7"
    assert [clip.about for clip in shown.trajectories] == [
        "validate, after 30 updates, seed 7",
        "train, after 10 updates, seed 6",
        "train, after 10 updates, seed 5",
    ]
    assert shown.left_out == []
    assert base64.b64decode(shown.evaluations[0].uri.partition(",")[2]) == b"x" * 300


def test_a_trajectory_without_pictures_has_its_own_path(tmp_path: Path) -> None:
    clip = gallery([recorded(tmp_path)], 1e6).trajectories[-1]
    assert (clip.path, clip.uri, clip.size) == (clip.trajectory, "", 0)


def test_there_is_only_so_much_room_and_what_is_left_out_is_known(tmp_path: Path) -> None:
    """A video of 300 bytes takes 400 in the page."""
    shown = gallery([recorded(tmp_path)], 900)
    inside = [clip for clip in (*shown.evaluations, *shown.trajectories) if clip.uri]
    assert [clip.about for clip in inside] == ["validate, after 30 updates, seed 7"] * 2  # one of each kind
    assert len(shown.left_out) == 3
    assert all(clip.path.is_file() for clip in shown.left_out)


def test_runs_share_the_room(tmp_path: Path) -> None:
    shown = gallery([recorded(tmp_path, "a"), recorded(tmp_path, "b")], 900)
    assert [clip.path.parents[2].name for clip in shown.evaluations if clip.uri] == ["a", "b"]
