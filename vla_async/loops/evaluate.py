"""``EvaluateLoop``: exactly the episodes that were asked for, on seeds that training never sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async.collectors.episodes import Episode
from vla_async.collectors.pool import EnvPool
from vla_async.collectors.pool_recorder import PoolRecorder
from vla_async.data.trajectory_store import Quota, TrajectoryStore
from vla_async.envs.base import EnvFactory, OnSuccess
from vla_async.limits import check_evaluation_device
from vla_async.loops.evaluation_wave import Wave
from vla_async.monitor import metric_table as names
from vla_async.monitor.metric import Family
from vla_async.monitor.metrics import SuccessRate, mean
from vla_async.monitor.video import VideoRecorder
from vla_async.policies.base import VLAPolicy
from vla_async.rng import Split

SuccessKind = Literal["success_once", "success_at_end"]
_SUCCESS: dict[SuccessKind, tuple[Family, Family, Family]] = {  # the rate, and the ends of its interval
    "success_once": (names.SUCCESS_ONCE, names.SUCCESS_ONCE_LOW, names.SUCCESS_ONCE_HIGH),
    "success_at_end": (names.SUCCESS_AT_END, names.SUCCESS_AT_END_LOW, names.SUCCESS_AT_END_HIGH),
}


@dataclass
class EvaluationResult:
    """The episodes of one evaluation, in the order of their tasks and seeds.

    Attributes:
        split: ``validate`` or ``test``.
        policy_version: number of updates behind the evaluated weights.
        episodes: all of them.
        videos: files written.
        env_steps: executed for training before the evaluated weights; the trainer fills it in.
    """

    split: Split
    policy_version: int
    episodes: list[Episode]
    videos: list[Path] = field(default_factory=list)
    env_steps: int = 0

    def success(self, kind: SuccessKind = "success_once", task: str | None = None) -> SuccessRate:
        """The success rate over all episodes, or over those of one task."""
        chosen = [episode for episode in self.episodes if task in (None, episode.task)]
        return SuccessRate(sum(getattr(episode, kind) for episode in chosen), len(chosen))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(episode.task for episode in self.episodes))

    def metrics(self) -> dict[str, float]:
        """What is logged: both success rates with n and interval, mean return and length; per task if there are several."""
        out: dict[str, float] = {}
        for task in [None, *(self.tasks if len(self.tasks) > 1 else [])]:
            of = (self.split,) if task is None else (self.split, task)
            for kind, (name, low, high) in _SUCCESS.items():
                rate = self.success(kind, task)
                out[name.of(*of)] = rate.rate
                out[low.of(*of)], out[high.of(*of)] = rate.interval
            out[names.EVALUATED_EPISODES.of(*of)] = rate.n
            episodes = [episode for episode in self.episodes if task in (None, episode.task)]
            out[names.EVALUATED_RETURN.of(*of)] = mean(episode.episode_return for episode in episodes)
            out[names.EVALUATED_LENGTH.of(*of)] = mean(episode.env_steps for episode in episodes)
        out[names.EVALUATED_VERSION.of(self.split)] = self.policy_version
        return out


class EvaluateLoop:
    """Runs a policy on held-out episodes and counts successes.

    Consumes: a policy and its envs' factory.
    Waits for: the slowest env of each decision.
    Produces: an :class:`EvaluationResult`, and videos.
    Unblocked by: the env workers, each within ``timeout_s``.

    Every episode is known beforehand by its task and seed, and its noise depends on these alone, so the result does not
    depend on the number of envs (beyond the last bit of an action, which a network can round differently in another batch
    size). The envs stay open from one call to the next, until :meth:`close`.

    Args:
        num_episodes: episodes per task.
        num_envs: envs to use; those of the factory by default.
        deterministic: take the mode of the policy instead of sampling.
        on_success: ``continue`` runs each episode to its horizon, which is what makes success_at_end differ from
            success_once; None keeps the factory's own setting.
        num_videos: how many episodes of the first env of each task are recorded; of a batch, of its first env only.
        timeout_s: how long an env may take to be built or to answer.
        beside_training: validate during ``fit`` in a process of its own, on a frozen copy of the weights, while rollouts
            and training go on; see :class:`~vla_async.loops.validation.BesideTraining`. Off: training waits.
        device: where the policy acts in that process, for example ``cuda:1``; the CPU by default.
    """

    def __init__(
        self,
        num_episodes: int = 50,
        num_envs: int | None = None,
        deterministic: bool = True,
        on_success: OnSuccess | None = "continue",
        num_videos: int = 1,
        timeout_s: float = 300.0,
        beside_training: bool = False,
        device: str | None = None,
    ) -> None:
        if num_episodes < 1:
            raise ValueError(f"evaluate_loop.num_episodes={num_episodes} must be at least 1")
        if num_envs is not None and num_envs < 1:
            raise ValueError(f"evaluate_loop.num_envs={num_envs} must be at least 1, or null for the factory's")
        if on_success not in (None, "terminate", "finish_chunk", "continue"):
            raise ValueError(f"evaluate_loop.on_success={on_success!r}: choose terminate, finish_chunk, continue or null")
        if num_videos < 0:
            raise ValueError(f"evaluate_loop.num_videos={num_videos} must not be negative")
        if not timeout_s > 0:
            raise ValueError(f"evaluate_loop.timeout_s={timeout_s} must be positive")
        check_evaluation_device(device, beside_training)
        self.beside_training, self.device = beside_training, torch.device(device or "cpu")
        self.num_episodes, self.num_envs, self.deterministic = num_episodes, num_envs, deterministic
        self.on_success, self.num_videos, self.timeout_s = on_success, num_videos, timeout_s
        self._pool: EnvPool | None = None
        self._key: Any = None
        self._ended: list[Collection[Episode]] = []

    def check(self, factory: EnvFactory) -> None:
        """Refuse envs that cannot be evaluated in, before any is built; raises as :meth:`open`."""
        next(self._waves(factory))

    def open(self, factory: EnvFactory) -> EnvPool:
        """The evaluation envs of ``factory``, of its first tasks if there are fewer envs than tasks.

        Envs that are open already are kept if they are the same.

        Raises:
            ValueError: if a batched factory has fewer envs than tasks.
            WorkerError: if an env cannot be built.
        """
        return self._open(factory, next(self._waves(factory)))

    def _waves(self, factory: EnvFactory) -> Iterator[list[int]]:
        """Env indices that run together: all tasks at once if there are envs for them, else one group after another."""
        count, tasks = self.num_envs or factory.num_envs, len(factory.task_names)
        if factory.is_batched:
            if count < tasks:
                fix = f"set evaluate_loop.num_envs to at least {tasks}"
                raise ValueError(f"{count} envs in one batch cannot run {tasks} tasks; {fix}")
            yield list(range(count))
        elif count >= tasks:
            yield list(range(min(count, tasks * self.num_episodes)))  # more would have nothing to do
        else:
            for start in range(0, tasks, count):
                yield list(range(start, min(start + count, tasks)))

    def _open(self, factory: EnvFactory, indices: list[int]) -> EnvPool:
        on_success = factory.on_success if self.on_success is None else self.on_success
        # env i runs task i % tasks, so there must be as many as there are tasks, although not all of them at once
        count = max(self.num_envs or factory.num_envs, len(factory.task_names))
        adapted = dataclasses.replace(factory, num_envs=count, on_success=on_success)
        if self._pool is None or self._key != (adapted, indices):
            self.close()
            first_of_task = range(min(len(indices), len(factory.task_names))) if self.num_videos else []
            self._pool = EnvPool(adapted, indices=indices, render=list(first_of_task), timeout_s=self.timeout_s)
            self._key = (adapted, indices)
        return self._pool

    @torch.no_grad()
    def run(
        self,
        policy: VLAPolicy,
        factory: EnvFactory,
        split: Split,
        *,
        policy_version: int = 0,
        videos: Path | None = None,
        store: TrajectoryStore | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        progress: Callable[[int], None] | None = None,
    ) -> EvaluationResult:
        """Evaluate.

        Args:
            policy: built; acts on its own device.
            factory: the envs.
            split: which seeds: ``validate`` or ``test``.
            policy_version: number of updates behind the policy's weights.
            videos: directory for recordings; none are made without it.
            store: where some episodes are saved; none are without it.
            autocast: makes the context in which the policy acts.
            progress: is told how many episodes have ended.

        Raises:
            ValueError: if a batched factory has fewer envs than tasks.
            WorkerError: if an env fails.
            FloatingPointError: if the policy's action is not finite.
        """
        mode = ExplorationType.DETERMINISTIC if self.deterministic else ExplorationType.RANDOM
        was_training = policy.training
        policy.eval()
        try:
            with set_exploration_type(mode), autocast():
                return self._run(policy, factory, split, policy_version, videos, store, progress)
        except BaseException:
            self.close()  # envs that were left in the middle of a command
            raise
        finally:
            policy.train(was_training)

    def _run(
        self,
        policy: VLAPolicy,
        factory: EnvFactory,
        split: Split,
        version: int,
        videos: Path | None,
        store: TrajectoryStore | None,
        progress: Callable[[int], None] | None,
    ) -> EvaluationResult:
        result, self._ended = EvaluationResult(split, version, []), []
        quota = Quota(None if store is None else store.recording)
        for indices in self._waves(factory):
            films = VideoRecorder(videos, f"{split}_{version:06d}", self.num_videos)
            pool = self._open(factory, indices)
            recorder = PoolRecorder(pool, store, quota, factory=self._key[0], indices=indices, split=split)
            part = Wave(pool, policy, split, version, self.num_episodes, films, recorder)
            self._ended = [result.episodes, part.episodes.values()]
            for _ in part.run():
                if progress is not None:
                    progress(self.finished)
            result.episodes += [part.episodes[key] for key in sorted(part.episodes)]
            result.videos += films.files
            self._ended = [result.episodes]
        return result

    @property
    def finished(self) -> int:
        """How many episodes of the current evaluation have ended so far; may be read from another thread."""
        return sum(map(len, self._ended))

    def close(self) -> None:
        """End the evaluation envs."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
