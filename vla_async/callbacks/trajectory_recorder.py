"""``TrajectoryRecorder``: keeps some episodes, to look at them and to replay them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_async.callbacks.base import Callback
from vla_async.data.trajectory_store import Recording, TrajectoryStore, clear_unfinished

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class TrajectoryRecorder(Callback):
    """Saves failed episodes, and a few successful ones, of each task: ``trajectories/<task>/<name>.pt`` and a video beside.

    Of every evaluation, during ``fit`` (in turn or beside training), ``validate`` and ``test``, the first episodes to end
    are saved, and of training episodes if asked for. The newest replace the oldest: what remains of a run is of its last
    policies. ``vla-async replay FILE`` plays one again; :mod:`vla_async.data.trajectories` says what a file holds.

    The video shows what the cameras saw at each decision. A policy that sees no images gets one for the evaluated episodes
    that ``evaluate_loop.num_videos`` renders; of all others ``vla-async replay`` makes it. A full disk is warned of once,
    and the run goes on.

    Args:
        failed_per_task: failed episodes (success at no env step) to keep of each task and split; 0 for none.
        successful_per_task: successful ones. If both are 0, nothing is recorded.
        max_bytes: most bytes of all files together, videos included; the oldest make room.
        images: keep the images of the observations in the files too, uncompressed, not only in the videos.
        train_every_n_steps: save so many episodes that training consumes, from every n-th update on; 0 for none.
    """

    def __init__(
        self,
        failed_per_task: int = 2,
        successful_per_task: int = 1,
        max_bytes: int = 2**28,
        images: bool = False,
        train_every_n_steps: int = 0,
    ) -> None:
        counts = {"failed_per_task": failed_per_task, "successful_per_task": successful_per_task}
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"trajectory_recorder.{name}={value} must be 0 (none) or a number of episodes")
        if max_bytes < 1:
            raise ValueError(
                f"trajectory_recorder.max_bytes={max_bytes} must be a number of bytes; to save nothing, set failed_per_task "
                "and successful_per_task to 0"
            )
        if train_every_n_steps < 0:
            raise ValueError(
                f"trajectory_recorder.train_every_n_steps={train_every_n_steps} must be 0 (never) or a number of steps"
            )
        self.failed_per_task, self.successful_per_task, self.max_bytes = failed_per_task, successful_per_task, max_bytes
        self.images, self.train_every_n_steps = images, train_every_n_steps
        self._store: TrajectoryStore | None = None
        self._cut_short = False

    def trajectory_store(self, trainer: AsyncTrainer) -> TrajectoryStore | None:
        if not self.failed_per_task and not self.successful_per_task:
            return None
        if self._store is None:
            recording = Recording(
                directory=trainer.run.trajectories,
                failed_per_task=self.failed_per_task,
                successful_per_task=self.successful_per_task,
                max_bytes=self.max_bytes,
                images=self.images,
                train_every_n_steps=self.train_every_n_steps,
            )
            self._store, self._cut_short = TrajectoryStore(recording), False
        return self._store

    def on_exception(self, trainer: AsyncTrainer, error: BaseException) -> None:
        self._cut_short = True  # somebody waits for the run to end

    def on_end(self, trainer: AsyncTrainer) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        store.close(drop=self._cut_short)
        directory = store.recording.directory
        clear_unfinished(directory)
        if number := len(list(directory.glob("*/*.pt"))):
            print(f"{number} saved trajectories, for vla-async replay: {directory}", flush=True)
        for reason, number in store.skipped.items():
            print(f"  {number} more were not saved: {reason}", flush=True)
