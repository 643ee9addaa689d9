"""``SuccessPlot``: the learning curve of a run, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from vla_async.callbacks.base import Callback
from vla_async.monitor.report import SuccessPoint, plot_success

if TYPE_CHECKING:
    from vla_async.loops.evaluate import EvaluationResult
    from vla_async.trainer import AsyncTrainer


class SuccessPlot(Callback):
    """Draws ``success.png``: validated success against env steps, anew after each validation during ``fit``.

    A picture that the disk does not take is warned of once, and the run goes on.

    Args:
        filename: name of the picture in the run directory; its ending chooses the format (png, svg, pdf).
    """

    def __init__(self, filename: str = "success.png") -> None:
        if "/" in filename or not filename.endswith((".png", ".svg", ".pdf")):
            raise ValueError(f"success_plot.filename={filename!r} must be a plain file name that ends in .png, .svg or .pdf")
        self.filename = filename
        self.points: list[SuccessPoint] = []
        self._running, self._warned = False, False

    def on_start(self, trainer: AsyncTrainer) -> None:
        self.points, self._running, self._warned = [], trainer.state.stage == "fit", False

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        if not self._running:
            return
        rates = result.success("success_once"), result.success("success_at_end")
        self.points.append(SuccessPoint(result.env_steps, *rates))
        path = trainer.run.path / self.filename
        try:
            plot_success(self.points, path, title=trainer.name)
        except OSError as error:
            if not self._warned:
                rank_zero_warn(f"{path} could not be drawn, and the run goes on without: {error.strerror or error}")
            self._warned = True

    def on_end(self, trainer: AsyncTrainer) -> None:
        self._running = False
