"""Videos of episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

if TYPE_CHECKING:
    from vla_async.collectors.episodes import Episode

FRAMES_PER_SECOND = 20  # env steps


def write_video(path: Path, frames: Sequence[Tensor], frames_per_second: int = FRAMES_PER_SECOND) -> Path:
    """Encode pictures as H.264 in an mp4 file.

    Args:
        path: file to write; its directory is made.
        frames: uint8 ``[H, W, 3]`` each; odd sizes lose their last row or column, which the codec cannot hold.
        frames_per_second: playing speed.

    Returns:
        ``path``.

    Raises:
        OSError: if the file cannot be written.
    """
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("wb").close()  # says what is wrong with the place; of the encoder's process one only hears that its pipe broke
    even = [frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]
    writer: Any = imageio.get_writer(path, fps=frames_per_second, codec="libx264", macro_block_size=None, quality=7)
    with writer:
        for frame in even:
            writer.append_data(np.ascontiguousarray(frame.numpy()))
    return path


class VideoRecorder:
    """Keeps the pictures of the first episodes of some envs, and makes a video of each episode.

    Once the disk has refused a video, there is a warning and no further one is made.

    Args:
        directory: where the videos will stand; None records nothing.
        prefix: what their names begin with; task, seed and verdict follow.
        videos_per_env: episodes to record in each env.

    Attributes:
        files: videos written so far.
    """

    def __init__(self, directory: Path | None, prefix: str, videos_per_env: int) -> None:
        self.directory, self.prefix, self.videos_per_env = directory, prefix, videos_per_env
        self.files: list[Path] = []
        self._left: dict[int, int] = {}
        self._frames: dict[int, list[Tensor]] = {}

    def watch(self, rows: Iterable[int]) -> None:
        """Record in these envs."""
        self._left = {} if self.directory is None else dict.fromkeys(rows, self.videos_per_env)

    def begins(self, row: int) -> bool:
        """Whether the episode that begins in env ``row`` is recorded."""
        if self.directory is None or self._left.get(row, 0) == 0:
            return False
        self._left[row] -= 1
        self._frames[row] = []
        return True

    def add(self, row: int, frames: Sequence[Tensor]) -> None:
        """Keep pictures of env ``row``, if its episode is recorded."""
        if row in self._frames:
            self._frames[row] += frames

    def ends(self, row: int, episode: Episode) -> None:
        """Make a video of the episode that has ended in env ``row``, if there are pictures of it."""
        frames = self._frames.pop(row, [])
        if frames and self.directory is not None:
            verdict = "success" if episode.success_once else "failure"
            name = f"{self.prefix}_{episode.task}_{episode.seed}_{verdict}.mp4".replace("/", "-")
            self._write(self.directory / name, frames)

    def _write(self, path: Path, frames: Sequence[Tensor]) -> None:
        try:
            self.files.append(write_video(path, frames))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # what there is of it does not play
            # names the directory, not the video: Python shows the same warning once, however many evaluations follow
            rank_zero_warn(f"no videos in {path.parent}, and the evaluation goes on without: {error.strerror or error}")
            self.directory = None
