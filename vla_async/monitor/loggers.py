"""Loggers that live with a run. Lightning's own work too; these know where the run's files are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from lightning.fabric.loggers import TensorBoardLogger


class RunLogger(ABC):
    """What a logger adds that wants to be told of runs. Its ``finalize`` ends what :meth:`begin_run` has begun."""

    @abstractmethod
    def begin_run(self, directory: Path) -> None:
        """A run begins, whose files lie in ``directory``; nothing has been started yet.

        Raises:
            ValueError: if it cannot log; names the setting and the fix.
        """


class TensorBoard(TensorBoardLogger, RunLogger):
    """Lightning's logger, with its events in the run directory: ``tensorboard --logdir runs`` shows all runs by name.

    Args:
        name: of the directory, within that of the run.
    """

    def __init__(self, name: str = "tensorboard") -> None:
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"loggers.TensorBoard.name={name!r} must be a plain directory name")
        super().__init__(root_dir="", name=name, version="")

    def begin_run(self, directory: Path) -> None:
        """Write the next events there."""
        self._root_dir, self._experiment = str(directory), None
