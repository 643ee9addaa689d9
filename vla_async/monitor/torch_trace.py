"""``TorchTrace``: torch's own profile of a process, for as long as the timeline records."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import profiler


class TorchTrace:
    """Profiles once, from the moment when it is on until it is off, and then writes a file in Chrome's trace format.

    Args:
        path: file to write; its directory is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._profiler: profiler.profile | None = None
        self._over = False

    def follow(self, on: bool) -> None:
        """Begin or end, if it is time to; called by the thread that is profiled."""
        if on and self._profiler is None and not self._over:
            kinds = [profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(profiler.ProfilerActivity.CUDA)
            self._profiler = profiler.profile(activities=kinds)
            self._profiler.start()
        elif not on:
            self.close()

    def close(self) -> None:
        """End, and write what there is. Harmless if called again."""
        ended, self._profiler = self._profiler, None
        if ended is not None:
            self._over = True
            ended.stop()
            ended.export_chrome_trace(str(self.path))
