"""``CollectLoop``: demonstrations by a scripted controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_async.collectors.episodes import EpisodeTracker
from vla_async.collectors.pool import EnvPool
from vla_async.data.demonstrations import DemonstrationWriter, check_target
from vla_async.envs.base import EnvFactory
from vla_async.rng import TRAIN_SEEDS, fold

if TYPE_CHECKING:
    from vla_async.envs.controllers import ScriptedController


@dataclass(frozen=True)
class CollectReport:
    """How a collection went.

    Attributes:
        directory: the dataset.
        episodes: successful episodes written.
        attempts: episodes that were tried for them.
        frames: env steps written.
    """

    directory: Path
    episodes: int
    attempts: int
    frames: int


class CollectLoop:
    """Collects demonstrations: a scripted controller acts in the envs, and only successful episodes are kept.

    Consumes: envs and a controller that may look into the simulator.
    Waits for: the slowest env of each env step.
    Produces: a dataset (:mod:`vla_async.data.demonstrations`) and the count of attempts that it took.
    Unblocked by: the env workers, each within ``env_timeout_s``.

    Attempt ``k`` has a seed of its own, whatever the number of envs; the successes of the lowest attempts are kept.

    Args:
        controller: the scripted controller.
        num_episodes: successful episodes to write.
        max_attempts: give up after so many episodes; four times ``num_episodes`` by default.
        directory: where the dataset will stand.
        overwrite: replace a dataset that stands there.
        env_timeout_s: how long an env may take to be built or to answer.
    """

    def __init__(
        self,
        controller: ScriptedController | None = None,
        num_episodes: int = 50,
        max_attempts: int | None = None,
        directory: Path = Path("demonstrations"),
        overwrite: bool = False,
        env_timeout_s: float = 300.0,
    ) -> None:
        if num_episodes < 1:
            raise ValueError(f"collect_loop.num_episodes={num_episodes} must be at least 1")
        if max_attempts is not None and max_attempts < num_episodes:
            raise ValueError(
                f"collect_loop.max_attempts={max_attempts} cannot give collect_loop.num_episodes={num_episodes} successes"
            )
        if not env_timeout_s > 0:
            raise ValueError(f"collect_loop.env_timeout_s={env_timeout_s} must be positive")
        self.controller, self.num_episodes, self.overwrite = controller, num_episodes, overwrite
        self.max_attempts = 4 * num_episodes if max_attempts is None else max_attempts
        self.directory, self.env_timeout_s = Path(directory), env_timeout_s

    def check(self) -> None:
        """Refuse what cannot work, before any worker starts.

        Raises:
            ValueError: if no controller is set.
            FileExistsError: if the directory is taken.
            RuntimeError: if the directory cannot be written.
        """
        if self.controller is None:
            raise ValueError("trainer.collect_loop.controller is not set; give a ScriptedController by its class_path")
        check_target(self.directory, self.overwrite)

    def run(self, factory: EnvFactory, seed: int, progress: Callable[[int, int], Any] | None = None) -> CollectReport:
        """Collect and write the dataset.

        If the collection ends early, what there is gets written, unless a dataset stands there: only a complete one
        replaces it.

        Args:
            factory: the envs; collection decides at every env step and ends an episode at its success.
            seed: root of the attempts' seeds, which come from the training range.
            progress: called with (successes, attempts) after each finished attempt.

        Raises:
            ValueError: if no controller is set.
            FileExistsError: if the directory is taken.
            RuntimeError: if ``max_attempts`` do not give ``num_episodes`` successes.
            WorkerError: if an env or the controller fails.
        """
        self.check()
        single = dataclasses.replace(factory, chunk_size=1, on_success="terminate")
        with EnvPool(single, controller=self.controller, timeout_s=self.env_timeout_s) as pool:
            collection = _Collection(pool, seed, self.num_episodes, self.max_attempts, progress)
            try:
                collection.run()
            finally:
                report = self._write(collection, factory)
        if report.episodes < self.num_episodes:
            written = f"; those are in {self.directory}" if report.frames else ""
            raise RuntimeError(
                f"only {report.episodes} of {report.attempts} attempts succeeded, but collect_loop.num_episodes="
                f"{self.num_episodes}{written}; raise collect_loop.max_attempts or mend the controller"
            )
        return report

    def _write(self, collection: _Collection, factory: EnvFactory) -> CollectReport:
        kept = collection.successes()
        complete = len(kept) == self.num_episodes
        # which attempts come after the last one kept depends on the number of envs, so they do not count
        attempts = max(kept) + 1 if complete else collection.finished
        frames = 0
        if complete or (kept and not self.directory.exists()):
            writer = DemonstrationWriter(self.directory, collection.pool.spec, self.overwrite, factory)
            for episode in kept.values():
                writer.add(**episode)
                frames += len(episode["frames"])
            writer.write(attempts)
        return CollectReport(self.directory, len(kept), attempts, frames)


class _Collection:
    """The attempts of one call."""

    def __init__(
        self, pool: EnvPool, seed: int, wanted: int, max_attempts: int, progress: Callable[[int, int], Any] | None
    ) -> None:
        self.pool, self.seed, self.wanted, self.max_attempts, self.progress = pool, seed, wanted, max_attempts, progress
        self.started, self.finished = 0, 0
        self._good: dict[int, dict[str, Any]] = {}  # attempt -> episode
        self._attempt = torch.full((pool.num_envs,), -1)
        self._frames: list[list[TensorDict]] = [[] for _ in range(pool.num_envs)]
        self._tracker = EpisodeTracker(pool)

    def successes(self) -> dict[int, dict[str, Any]]:
        """The first ``wanted`` successes, in the order of their attempts."""
        return {attempt: self._good[attempt] for attempt in sorted(self._good)[: self.wanted]}

    def run(self) -> None:
        self._begin(range(self.pool.num_envs))
        while bool((self._attempt >= 0).any()):
            self._step()

    def _seeds(self) -> Tensor:
        attempts = self._attempt.clamp(min=0).tolist()
        return torch.tensor([fold(self.seed, "collect", attempt) % TRAIN_SEEDS for attempt in attempts])

    def _enough(self) -> bool:
        """Whether no attempt that has not begun yet could be among those kept."""
        return len(self._good) >= self.wanted or self.started >= self.max_attempts

    def _begin(self, rows: Any) -> None:
        started = torch.zeros(self.pool.num_envs, dtype=torch.bool)
        for row in rows:
            self._frames[row] = []
            self._attempt[row] = -1
            if not self._enough():
                self._attempt[row], started[row] = self.started, True
                self.started += 1
        if bool(started.any()):
            self.pool.reset(started, self._seeds())

    def _step(self) -> None:
        pool, active = self.pool, self._attempt >= 0
        before = {name: leaf.clone() for name, leaf in pool.rows.observation.items()}
        seeds = self._seeds()
        pool.step(pool.rows.chunk.clone(), active)
        rows = pool.rows
        for row in torch.nonzero(active).flatten().tolist():
            outcome = {"reward": rows.step_rewards[row].clone(), "success": rows.success[row : row + 1].clone()}
            outcome["done"] = (rows.terminated | rows.truncated)[row : row + 1].clone()
            frame = {"observation": {name: leaf[row] for name, leaf in before.items()}, "action": rows.chunk[row, 0].clone()}
            self._frames[row].append(TensorDict(frame | {"next": outcome}, batch_size=[]))
        ended = self._tracker.after_step(pool.tasks, seeds)
        for row, episode in ended.items():
            self.finished += 1
            if episode.success_at_end:
                frames: Any = torch.stack(self._frames[row])
                kept = {"task": episode.task, "instruction": pool.instructions[row], "success": True, "seed": episode.seed}
                self._good[int(self._attempt[row])] = {"frames": frames, **kept}
            if self.progress is not None:
                self.progress(len(self._good), self.finished)
        if ended:
            self._begin(sorted(ended))
