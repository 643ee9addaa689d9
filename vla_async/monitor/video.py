"""Videos of episodes."""

from __future__ import annotations

import contextlib
import subprocess
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("wb").close()  # says what is wrong with the place, better than the encoder does
    height, width = (size // 2 * 2 for size in frames[0].shape[:2])
    with subprocess.Popen(_encoder(path, width, height, frames_per_second), **_PIPES) as encoder:
        assert encoder.stdin is not None
        assert encoder.stderr is not None
        with contextlib.suppress(BrokenPipeError), encoder.stdin:  # else it has ended, and says why
            for frame in frames:
                encoder.stdin.write(np.ascontiguousarray(frame[:height, :width].numpy()).tobytes())
        said = encoder.stderr.read().decode(errors="replace").strip()
    if encoder.returncode:
        raise OSError(f"{path}: {said.splitlines()[-1] if said else f'the encoder ended with {encoder.returncode}'}")
    return path


# Not by imageio's own writer: it runs Python between fork and exec, where torch clears what other threads of this process
# had, and waits for ever for those of a process group. A session of its own keeps Ctrl-C from the encoder.
_PIPES: Any = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}


def _encoder(path: Path, width: int, height: int, frames_per_second: int) -> list[str]:
    """The command that encodes pictures from its standard input."""
    from imageio_ffmpeg import get_ffmpeg_exe

    pictures = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(frames_per_second), "-i", "-"]
    h264 = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "15", str(path)]
    return [get_ffmpeg_exe(), "-y", "-loglevel", "error", *pictures, *h264]


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
