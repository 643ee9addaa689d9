"""``TrajectoryStore``: which episodes are kept, and the thread that writes them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from vla_async import keys
from vla_async.data.trajectories import Trajectory, library_versions, plain_name
from vla_async.monitor.video import FRAMES_PER_SECOND, write_video

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

MOST_IN_MEMORY = 2**28  # bytes of episodes that wait to be written, and as many of those that are being recorded
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Recording:
    """Which episodes are saved, and where. The settings are those of :class:`~vla_async.callbacks.TrajectoryRecorder`."""

    directory: Path
    failed_per_task: int
    successful_per_task: int
    max_bytes: int
    images: bool
    train_every_n_steps: int

    def most(self, success: bool) -> int:
        """How many episodes of a task and split that ended so are kept."""
        return self.successful_per_task if success else self.failed_per_task


class Quota:
    """How many more episodes of each task are to be saved, by how they ended.

    Args:
        recording: says how many; None for none at all.
        of_training: of the episodes that training consumes, which are wanted from every n-th update on.
    """

    def __init__(self, recording: Recording | None, of_training: bool = False) -> None:
        self._recording, self._taken = recording, Counter[tuple[str, bool]]()
        self._is_open = recording is not None and not of_training

    def begin(self, version: int) -> None:
        """An update begins, of weights of this version."""
        every = 0 if self._recording is None else self._recording.train_every_n_steps
        if every and version % every == 0:
            self._taken.clear()
            self._is_open = True

    def wants(self, task: str, success: bool) -> bool:
        """Whether an episode of this task that ended so is to be saved."""
        return self._is_open and self._recording is not None and self._taken[task, success] < self._recording.most(success)

    def may_want(self, task: str) -> bool:
        """Whether an episode of this task may be to be saved, however it ends."""
        return self.wants(task, False) or self.wants(task, True)

    def take(self, task: str, success: bool) -> None:
        """Count one that is saved."""
        self._taken[task, success] += 1


class TrajectoryStore:
    """Writes episodes as ``<directory>/<task>/<split>_<version>_<seed>_<verdict>.pt``, and ``.mp4`` if there are pictures.

    A thread writes, so that nobody waits for the encoding of a video; what comes while so much waits that memory would fill
    up is left out, and counted. Of each task, split and verdict the newest replace the oldest, and so they do where all
    files together would be larger than ``max_bytes``. What an error leaves is no file of these names. Once the disk has
    refused a file, there is a warning and nothing more is written.

    Args:
        recording: what is kept, and where.

    Attributes:
        skipped: episodes that were not saved although they were wanted, by the reason.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.skipped = recording, Counter[str]()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectories")  # starts its thread with the first episode
        self._lock, self._waiting, self._jobs = threading.Lock(), 0, list[Future[None]]()
        self._refused = False

    def save(self, trajectory: Trajectory, pictures: Sequence[Tensor] = ()) -> None:
        """Write an episode soon.

        Args:
            trajectory: it; nobody may change its tensors any more.
            pictures: uint8 ``[height, width, 3]`` per env step, for the video of an episode whose observations have none.
        """
        size = trajectory.nbytes + sum(picture.numel() for picture in pictures)
        with self._lock:
            if self._waiting and self._waiting + size > MOST_IN_MEMORY:
                self.skipped["too many waited to be written"] += 1
                return
            self._waiting += size
        self._jobs = [job for job in self._jobs if not job.done()]
        self._jobs.append(self._writer.submit(self._write, trajectory, pictures, size))

    def flush(self) -> None:
        """Wait until all that was given has been written."""
        wait(self._jobs)

    def close(self, drop: bool = False) -> None:
        """Wait until all is written, or drop what has not been begun, and end the thread."""
        self._writer.shutdown(cancel_futures=drop)
        if dropped := sum(job.cancelled() for job in self._jobs):
            self.skipped["the run was cut short"] += dropped
        self._jobs = []

    def _write(self, trajectory: Trajectory, pictures: Sequence[Tensor], size: int) -> None:
        try:
            if not self._refused:
                self._write_files(trajectory, pictures)
        except Exception as error:  # noqa: BLE001 - whatever it is, hours of training must not end for a file to look at
            self._refused = True
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            rank_zero_warn(f"no more trajectories in {self.recording.directory}, and the run goes on without: {reason}")
        finally:
            with self._lock:
                self._waiting -= size

    def _write_files(self, trajectory: Trajectory, pictures: Sequence[Tensor]) -> None:
        directory = self.recording.directory / plain_name(trajectory.info["task"])
        directory.mkdir(parents=True, exist_ok=True)
        data, video = directory / f"{_UNFINISHED}{trajectory.stem}", directory / f"{_UNFINISHED}{trajectory.stem}.mp4"
        chunk_size, speed = trajectory.decisions[keys.EXECUTED].shape[1], FRAMES_PER_SECOND
        if seen := trajectory.pictures():  # one per decision, so it plays as slowly as the env moves
            pictures, speed = seen, max(1, round(FRAMES_PER_SECOND / chunk_size))
        trajectory.info["versions"] = library_versions()
        try:
            data.write_bytes((trajectory if self.recording.images else trajectory.without_images()).to_bytes())
            if pictures:
                write_video(video, pictures, speed)
            with _locked(self.recording.directory):
                self._keep(trajectory, data, video)
        finally:
            data.unlink(missing_ok=True)
            video.unlink(missing_ok=True)

    def _keep(self, trajectory: Trajectory, data: Path, video: Path) -> None:
        """Give the files their names, in place of older ones where there would be too many or too much."""
        size = sum(path.stat().st_size for path in (data, video) if path.exists())
        if size > self.recording.max_bytes:
            self.skipped["larger than max_bytes"] += 1
            return
        same = _by_age(data.parent.glob(f"{trajectory.info['split']}_*_{trajectory.verdict}*.pt"))
        for path in same[: max(0, len(same) + 1 - self.recording.most(trajectory.info["success_once"]))]:
            _remove(path)
        kept = _by_age(self.recording.directory.glob("*/*.pt"))
        total = sum(map(_size, kept))
        while kept and total + size > self.recording.max_bytes:
            total -= _size(kept[0])
            _remove(kept.pop(0))
        name, number = trajectory.stem, 1
        while (target := data.with_name(f"{name}.pt")).exists():  # the rows of a group share a seed
            number += 1
            name = f"{trajectory.stem}-{number}"
        if video.exists():
            os.replace(video, target.with_suffix(".mp4"))
        os.replace(data, target)


def store_of(trainer: AsyncTrainer) -> TrajectoryStore | None:
    """Where the callbacks of a trainer want the episodes of its run to be saved; None for nowhere."""
    stores = (callback.trajectory_store(trainer) for callback in trainer.callbacks)
    return next((store for store in stores if store is not None), None)


def clear_unfinished(directory: Path) -> None:
    """Remove what a writer has left that was killed."""
    for path in directory.glob(f"*/{_UNFINISHED}*"):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone, among the processes that write there: the trainer and the evaluation beside it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _by_age(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _size(path: Path) -> int:
    """Bytes of a trajectory on disk, its video included."""
    return sum(part.stat().st_size for part in (path, path.with_suffix(".mp4")) if part.exists())


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_suffix(".mp4").unlink(missing_ok=True)
