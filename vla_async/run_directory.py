"""``runs/<name>/<time>/``: everything that one run writes, and only that run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vla_async.monitor.environment import write_environment


@dataclass(frozen=True)
class RunDirectory:
    """The files of a run: config.yaml, environment.json, metrics.csv, checkpoints/, videos/, trajectories/, success.png."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Make a new directory that no other run owns.

        Raises:
            RuntimeError: if it cannot be written.
        """
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for attempt in range(1000):
            path = root / name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RuntimeError(f"trainer.root_dir={str(root)!r} cannot be written to: {error}") from error
            return cls(path)
        raise RuntimeError(f"{root / name} has a thousand runs of this very second")

    def describe(self, config_text: str | None) -> None:
        """Write what ran, if that is known, and what it ran on."""
        write_environment(self.path)
        if config_text is not None:
            (self.path / "config.yaml").write_text(config_text)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"


def checkpoints_of(name: str, root: Path, which: str) -> list[Path]:
    """The ``last`` or ``best`` checkpoints of all runs of a name, newest first."""
    found = (root / name).glob(f"*/checkpoints/{which}.ckpt")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def resolve_checkpoint(ckpt_path: str | os.PathLike[str], root: Path, name: str) -> Path:
    """Find a checkpoint.

    Args:
        ckpt_path: a file; or ``last`` or ``best``, for that checkpoint of the newest run of this name that has one.
        root: directory of all runs.
        name: name of the run.

    Raises:
        FileNotFoundError: says where was looked.
    """
    if str(ckpt_path) not in ("last", "best"):
        path = Path(ckpt_path)
        if not path.is_file():
            raise FileNotFoundError(f"ckpt_path={str(path)!r} is not a file; give a file, or last or best")
        return path
    found = checkpoints_of(name, root, str(ckpt_path))
    if not found:
        raise FileNotFoundError(f"ckpt_path={ckpt_path}: no run under {root / name} has checkpoints/{ckpt_path}.ckpt yet")
    return found[0]
