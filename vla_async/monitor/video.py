"""Videos of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor


def write_video(path: Path, frames: Sequence[Tensor], frames_per_second: int = 20) -> Path:
    """Encode pictures as H.264 in an mp4 file.

    Args:
        path: file to write; its directory is made. Slashes in a task name must have been replaced.
        frames: uint8 ``[H, W, 3]`` each; odd sizes lose their last row or column, which the codec cannot hold.
        frames_per_second: playing speed.

    Returns:
        ``path``.
    """
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    even = [frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]
    with imageio.get_writer(path, fps=frames_per_second, codec="libx264", macro_block_size=None, quality=7) as writer:
        for frame in even:
            writer.append_data(np.ascontiguousarray(frame.numpy()))
    return path
