"""Which episodes are kept, and that writing them stops nothing."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import pytest
import torch

from tests.data.trajectory_fakes import trajectory
from vla_async.data import trajectory_store as module
from vla_async.data.trajectories import Trajectory
from vla_async.data.trajectory_store import Quota, Recording, TrajectoryStore, clear_unfinished

IMAGES = {"image": (3, 16, 16)}


def recording(root: Path, **settings: Any) -> Recording:
    defaults: dict[str, Any] = {"failed_per_task": 2, "successful_per_task": 1, "max_bytes": 2**20, "images": False}
    return Recording(**({"directory": root / "trajectories", "train_every_n_steps": 0} | defaults | settings))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Stores, each closed in the end."""
    stores: list[TrajectoryStore] = []

    def build(**settings: Any) -> TrajectoryStore:
        stores.append(TrajectoryStore(recording(tmp_path, **settings)))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def names(store: TrajectoryStore) -> list[str]:
    """The files, oldest first by the order in which they were given."""
    return sorted(str(path.relative_to(store.recording.directory)) for path in store.recording.directory.rglob("*.*"))


def give(store: TrajectoryStore, *trajectories: Trajectory) -> None:
    """One after the other, each with an age of its own."""
    for number, given in enumerate(trajectories):
        store.save(given)
        store.flush()
        for path in store.recording.directory.glob(f"*/{given.stem}.pt"):
            os.utime(path, (1e9 + number, 1e9 + number))


def test_the_newest_replace_the_oldest_of_the_same_task_split_and_verdict(make: Any) -> None:
    """A run's last failures are those to look at; another task's must not be lost for them."""
    store = make(failed_per_task=2, successful_per_task=1)
    failures = [trajectory(seed=seed) for seed in (1, 2, 3)]
    others = [trajectory(task="pick/up", seed=4), trajectory(seed=5, split="test"), trajectory(success=True, seed=6)]
    give(store, *others, *failures, trajectory(success=True, seed=8))
    assert names(store) == [
        "pick-up/validate_000005_4_failure.pt",
        "push/test_000005_5_failure.pt",
        "push/validate_000005_2_failure.pt",
        "push/validate_000005_3_failure.pt",
        "push/validate_000005_8_success.pt",
    ]


def test_episodes_of_one_name_stand_beside_each_other(make: Any) -> None:
    """The members of a group share seed and version."""
    store = make(failed_per_task=3)
    give(store, trajectory(images=IMAGES), trajectory(images=IMAGES))
    stem = "push/validate_000005_7_failure"
    assert names(store) == [f"{stem}-2.mp4", f"{stem}-2.pt", f"{stem}.mp4", f"{stem}.pt"]


def test_all_files_together_stay_below_the_limit(make: Any) -> None:
    """Counted on the disk, videos included; what makes room is the oldest, of whatever task."""
    probe = make()
    give(probe, trajectory(images=IMAGES))
    one = sum(path.stat().st_size for path in probe.recording.directory.rglob("*.*"))
    assert one > len(trajectory().to_bytes()), "the video counts for nothing"
    store = TrajectoryStore(replace(probe.recording, max_bytes=int(2.5 * one), failed_per_task=9))
    give(store, *(trajectory(seed=seed, images=IMAGES, task=f"task{seed}") for seed in (1, 2, 3)))
    assert [name for name in names(store) if name.endswith(".pt")] == [
        f"task{seed}/validate_000005_{seed}_failure.pt" for seed in (2, 3)
    ]
    store.close()


def test_what_is_larger_than_the_limit_alone_is_skipped_and_drives_nothing_out(make: Any) -> None:
    store = make(max_bytes=40_000, images=True)
    give(store, trajectory(seed=1), trajectory(seed=2, images={"image": (3, 200, 200)}))
    assert names(store) == ["push/validate_000005_1_failure.pt"]
    assert store.skipped == {"larger than max_bytes": 1}


@pytest.mark.parametrize("images", [False, True])
def test_the_video_shows_the_images_whether_or_not_they_are_kept(make: Any, images: bool) -> None:
    store = make(images=images)
    give(store, trajectory(images=IMAGES))
    data, video = (next(store.recording.directory.rglob(f"*.{ending}")) for ending in ("pt", "mp4"))
    assert Trajectory.load(data).image_names == (["image"] if images else [])
    with imageio.get_reader(video) as reader:
        assert [frame.shape for frame in reader] == [(128, 128, 3)] * 4
        assert reader.get_meta_data()["fps"] == 10, "a decision takes two env steps of a twentieth of a second"


def test_without_images_the_rendered_pictures_are_the_video(make: Any) -> None:
    store = make()
    store.save(trajectory(), [torch.zeros(32, 32, 3, dtype=torch.uint8)] * 6)
    store.flush()
    with imageio.get_reader(next(store.recording.directory.rglob("*.mp4"))) as reader:
        assert sum(1 for _ in reader) == 6


def test_a_full_disk_is_warned_of_once_and_leaves_nothing_half(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training must not end for it, nor be told again and again."""
    store = make()

    def is_full(path: Path, *rest: object) -> Path:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_video", is_full)
    with pytest.warns(UserWarning, match=r"no more trajectories in .*, and the run goes on without: No space left"):
        give(store, trajectory(images=IMAGES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        give(store, trajectory(seed=8))
    assert names(store) == []


def test_nobody_waits_for_the_writer(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that hangs costs memory up to a limit, and episodes after that, but no time."""
    gate = threading.Event()
    original = module.write_video

    def waits(*given: Any) -> Path:
        gate.wait(60.0)
        return original(*given)

    monkeypatch.setattr(module, "write_video", waits)
    size = trajectory(images=IMAGES).nbytes
    monkeypatch.setattr(module, "MOST_IN_MEMORY", 2 * size)
    store = make(failed_per_task=9)
    for seed in range(5):
        store.save(trajectory(seed=seed, images=IMAGES))
    assert store.skipped == {"too many waited to be written": 3}
    assert names(store) == [] or all(".unfinished-" in name for name in names(store))
    gate.set()
    store.flush()
    assert len([name for name in names(store) if name.endswith(".pt")]) == 2
    store.save(trajectory(seed=9))
    store.flush()
    assert any("_9_" in name for name in names(store)), "what had been written still counted"


def test_closing_in_a_hurry_drops_what_waits_and_ends_the_thread(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C somebody waits."""
    gate, began = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "library_versions", lambda: began.set() or gate.wait(60.0) or {})
    store = make(failed_per_task=9)
    for seed in range(3):
        store.save(trajectory(seed=seed))
    began.wait(60.0)
    threading.Timer(0.05, gate.set).start()
    store.close(drop=True)
    assert names(store) == ["push/validate_000005_0_failure.pt"]
    assert store.skipped == {"the run was cut short": 2}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trajectories")]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    kept, left = tmp_path / "push" / "a.pt", tmp_path / "push" / ".unfinished-b.mp4"
    left.parent.mkdir()
    kept.touch()
    left.touch()
    clear_unfinished(tmp_path)
    assert [path.name for path in left.parent.iterdir()] == ["a.pt"]


def test_a_quota_is_of_each_task_and_outcome(tmp_path: Path) -> None:
    """And of nothing where nothing is asked for."""
    quota = Quota(recording(tmp_path, failed_per_task=1, successful_per_task=0))
    assert quota.wants("a", False)
    assert not quota.wants("a", True)
    quota.take("a", False)
    assert not quota.may_want("a")
    assert quota.may_want("b")
    assert not Quota(None).may_want("a")


def test_training_episodes_are_wanted_from_every_nth_update_on(tmp_path: Path) -> None:
    """Until there are enough, not only in that update: an episode may take several."""
    quota = Quota(recording(tmp_path, failed_per_task=1, train_every_n_steps=3), of_training=True)
    assert not quota.may_want("a")
    wanted = []
    for version in range(2, 7):
        quota.begin(version)
        wanted.append(quota.wants("a", False))
        if version == 4:
            quota.take("a", False)
    assert wanted == [False, True, True, False, True]
    never = Quota(recording(tmp_path), of_training=True)
    never.begin(0)
    assert not never.may_want("a")
