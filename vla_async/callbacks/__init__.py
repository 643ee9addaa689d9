"""Callbacks: what looks on while a trainer works, and writes down what it sees."""

from vla_async.callbacks.base import Callback
from vla_async.callbacks.checkpoint import Checkpoint
from vla_async.callbacks.progress import Progress
from vla_async.callbacks.staleness_alert import StalenessAlert
from vla_async.callbacks.success_plot import SuccessPlot
from vla_async.callbacks.trajectory_recorder import TrajectoryRecorder

__all__ = ["Callback", "Checkpoint", "Progress", "StalenessAlert", "SuccessPlot", "TrajectoryRecorder"]
