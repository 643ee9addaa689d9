"""The callbacks that every trainer has."""

from __future__ import annotations

from collections.abc import Sequence

from vla_async.callbacks.base import Callback
from vla_async.callbacks.checkpoint import Checkpoint
from vla_async.callbacks.progress import Progress
from vla_async.callbacks.success_plot import SuccessPlot
from vla_async.callbacks.trajectory_recorder import TrajectoryRecorder

_ALWAYS: tuple[type[Callback], ...] = (Checkpoint, SuccessPlot, TrajectoryRecorder, Progress)


def with_defaults(given: Sequence[Callback]) -> list[Callback]:
    """The callbacks that were given, and those that are always there, unless one of their kind was given.

    Checkpoint comes last: it saves what the others have changed.
    """
    callbacks = [*given]
    callbacks += [kind() for kind in _ALWAYS if not any(isinstance(callback, kind) for callback in given)]
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
