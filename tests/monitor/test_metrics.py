"""Counting, and videos."""

from __future__ import annotations

import errno
import math
import subprocess
import warnings
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
import torch

from vla_async.collectors.episodes import Episode
from vla_async.monitor import video
from vla_async.monitor.metrics import Meter, SuccessRate, mean, wilson_interval
from vla_async.monitor.video import VideoRecorder, write_video


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # from the closed form, worked out with a calculator to four digits
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (85, 100, 0.7672, 0.9069), (1, 1, 0.2065, 1.0)],
)
def test_wilson_interval_equals_known_values(successes: int, n: int, low: float, high: float) -> None:
    """A wrong interval makes a lift look certain that is not."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_where_the_score_test_gives_way() -> None:
    """Its definition: at its ends the observed rate is exactly z standard errors away."""
    for successes, n in [(3, 17), (40, 41), (1, 100)]:
        for end in wilson_interval(successes, n, z=1.5):
            assert abs(successes / n - end) == pytest.approx(1.5 * math.sqrt(end * (1 - end) / n))


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5), (0, 0)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    """Nothing is known from no episodes."""
    with pytest.raises(ValueError, match=f"successes={successes} of n={n}"):
        wilson_interval(successes, n)


def test_success_rate_says_what_it_rests_on() -> None:
    """A rate without n says nothing."""
    assert str(SuccessRate(85, 100)) == "0.85 [0.77, 0.91] n=100"


def test_meter_divides_once() -> None:
    """A mean of means would weigh small micro-batches too much."""
    meter = Meter()
    meter.add({"loss": (torch.tensor(6.0), torch.tensor(3.0)), "kl": (torch.tensor(1.0), 4)})
    meter.add({"loss": (torch.tensor(10.0), 1.0)})
    meter.add({"empty": (torch.tensor(0.0), 0.0)})
    assert meter.means() == {"loss": 4.0, "kl": 0.25}


def test_meter_holds_no_graph() -> None:
    """A metric that keeps its graph keeps every micro-batch of the update in memory."""
    weight = torch.ones((), requires_grad=True)
    meter = Meter()
    meter.add({"loss": (weight * 2.0, 1.0)})
    assert not meter.sums["loss"].requires_grad


def test_mean_of_nothing_is_not_a_number() -> None:
    """Zero would read as a result."""
    assert math.isnan(mean([]))
    assert mean(iter([1.0, 2.0])) == 1.5


def frames(count: int, height: int = 17, width: int = 16) -> list[torch.Tensor]:
    return [torch.full((height, width, 3), 40 * index, dtype=torch.uint8) for index in range(count)]


def test_a_video_plays_and_has_every_frame(tmp_path: Path) -> None:
    """Odd sizes included, which the codec cannot hold."""
    path = write_video(tmp_path / "new" / "film.mp4", frames(5))
    with imageio.get_reader(path) as reader:
        shown = [np.asarray(frame) for frame in reader]
    assert [frame.shape for frame in shown] == [(16, 16, 3)] * 5
    assert np.allclose([frame.mean() for frame in shown], [0, 40, 80, 120, 160], atol=4)


def test_a_place_that_takes_no_video_says_why(tmp_path: Path) -> None:
    """And not that the pipe to an encoder broke."""
    with pytest.raises(IsADirectoryError):
        write_video(tmp_path, frames(1))


def test_an_encoder_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it was still to be given: that its pipe broke helps nobody."""
    monkeypatch.setattr(video, "_encoder", lambda *about: ["sh", "-c", "echo there is no room >&2; exit 3"])
    with pytest.raises(OSError, match="there is no room"):
        write_video(tmp_path / "film.mp4", frames(5, 1024, 1024))


def test_no_python_runs_between_fork_and_exec_of_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread's fork, torch would end the process groups of the other threads, and wait for that for ever."""
    started: list[dict[str, Any]] = []
    popen = subprocess.Popen

    def spy(command: list[str], **options: Any) -> Any:
        started.append(options)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    write_video(tmp_path / "film.mp4", frames(2))
    assert len(started) == 1
    assert "preexec_fn" not in started[0]


def episode(success: bool, task: str = "reach/left") -> Episode:
    return Episode(task, seed=7, success_once=success, success_at_end=False, episode_return=0.0, env_steps=2)


def test_recorder_films_the_first_episodes_of_the_watched_envs(tmp_path: Path) -> None:
    """Pictures of other episodes must neither be kept nor get into a film."""
    recorder = VideoRecorder(tmp_path, "test_000001", videos_per_env=1)
    recorder.watch([0, 2])
    assert [recorder.begins(row) for row in (0, 1, 2)] == [True, False, True]
    recorder.add(0, frames(2))
    recorder.add(1, frames(2))
    recorder.ends(0, episode(True))
    recorder.ends(1, episode(True))
    assert not recorder.begins(0)
    recorder.add(0, frames(2))
    recorder.ends(0, episode(True))
    recorder.ends(2, episode(False))  # nothing was seen of it: an env in a batch that cannot be pictured
    assert [path.name for path in recorder.files] == ["test_000001_reach-left_7_success.mp4"]
    assert list(tmp_path.iterdir()) == recorder.files


def test_a_disk_that_refuses_a_video_is_warned_of_once_and_stops_nothing(tmp_path: Path) -> None:
    """An evaluation is its figures; the run that it belongs to must not end for a video."""
    (tmp_path / "videos").touch()
    recorder = VideoRecorder(tmp_path / "videos", "test_000001", videos_per_env=3)
    recorder.watch([0, 1])
    assert recorder.begins(0)
    assert recorder.begins(1)
    recorder.add(0, frames(2))
    recorder.add(1, frames(2))
    with pytest.warns(UserWarning, match=r"no videos in .*videos, and the evaluation goes on without: File exists"):
        recorder.ends(0, episode(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.ends(1, episode(True))
    assert recorder.files == []
    assert not recorder.begins(0), "its pictures would be for nothing"


def test_a_video_that_breaks_off_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not play, and look like one that does."""

    def breaks_off(path: Path, frames: object) -> Path:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vla_async.monitor.video.write_video", breaks_off)
    recorder = VideoRecorder(tmp_path, "test_000001", videos_per_env=1)
    recorder.watch([0])
    recorder.begins(0)
    recorder.add(0, frames(2))
    with pytest.warns(UserWarning, match="No space left on device"):
        recorder.ends(0, episode(True))
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_nothing_is_recorded() -> None:
    """An evaluation by hand makes no files."""
    recorder = VideoRecorder(None, "test_000001", videos_per_env=1)
    recorder.watch([0])
    assert not recorder.begins(0)
