"""``EvaluateLoop``: exactly the episodes that were asked for, on seeds that training never sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.collectors.lockstep import Episode, EpisodeTracker, check_finite
from vla_async.collectors.pool import EnvPool
from vla_async.envs.base import EnvFactory, OnSuccess
from vla_async.monitor.metrics import SuccessRate, mean
from vla_async.policies.base import VLAPolicy
from vla_async.rng import Split, evaluation_seed, fold


@dataclass
class EvaluationResult:
    """The episodes of one evaluation, in the order of their tasks and seeds.

    Attributes:
        split: ``validate`` or ``test``.
        policy_version: number of updates behind the evaluated weights.
        episodes: all of them.
        videos: files written.
    """

    split: Split
    policy_version: int
    episodes: list[Episode]
    videos: list[Path] = field(default_factory=list)

    def success(self, kind: Literal["success_once", "success_at_end"] = "success_once", task: str | None = None) -> SuccessRate:
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
            suffix = "" if task is None else f"/{task}"
            for kind in ("success_once", "success_at_end"):
                rate = self.success(kind, task)  # type: ignore[arg-type]
                out[f"{self.split}/{kind}{suffix}"] = rate.rate
                out[f"{self.split}/{kind}_low{suffix}"], out[f"{self.split}/{kind}_high{suffix}"] = rate.interval
            out[f"{self.split}/episodes{suffix}"] = rate.n
        out[f"{self.split}/return"] = mean(episode.episode_return for episode in self.episodes)
        out[f"{self.split}/episode_env_steps"] = mean(episode.env_steps for episode in self.episodes)
        out[f"{self.split}/policy_version"] = self.policy_version
        return out


class EvaluateLoop:
    """Runs a policy on held-out episodes and counts successes.

    Consumes: a policy and its envs' factory.
    Waits for: the slowest env of each decision.
    Produces: an :class:`EvaluationResult`, and videos.
    Unblocked by: the env workers, each within ``timeout_s``.

    Every episode is known beforehand by its task and seed, and its noise depends on these alone, so the result does not
    depend on the number of envs. The envs stay open from one call to the next, until :meth:`close`.

    Args:
        num_episodes: episodes per task.
        num_envs: envs to use; those of the factory by default.
        deterministic: take the mode of the policy instead of sampling.
        on_success: ``continue`` runs each episode to its horizon, which is what makes success_at_end differ from
            success_once; None keeps the factory's own setting.
        num_videos: how many episodes of the first env of each task are recorded.
        timeout_s: how long an env may take to be built or to answer.
    """

    def __init__(
        self,
        num_episodes: int = 50,
        num_envs: int | None = None,
        deterministic: bool = True,
        on_success: OnSuccess | None = "continue",
        num_videos: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        if num_episodes < 1:
            raise ValueError(f"evaluate_loop.num_episodes={num_episodes} must be at least 1")
        if num_envs is not None and num_envs < 1:
            raise ValueError(f"evaluate_loop.num_envs={num_envs} must be at least 1, or null for the factory's")
        if num_videos < 0:
            raise ValueError(f"evaluate_loop.num_videos={num_videos} must not be negative")
        if timeout_s <= 0:
            raise ValueError(f"evaluate_loop.timeout_s={timeout_s} must be positive")
        self.num_episodes, self.num_envs, self.deterministic = num_episodes, num_envs, deterministic
        self.on_success, self.num_videos, self.timeout_s = on_success, num_videos, timeout_s
        self._pool: EnvPool | None = None
        self._key: Any = None

    def open(self, factory: EnvFactory, indices: Sequence[int] | None = None) -> EnvPool:
        """The evaluation envs ``indices`` of ``factory``; those that are open already if they are the same."""
        count = self.num_envs or factory.num_envs
        on_success = factory.on_success if self.on_success is None else self.on_success
        adapted = dataclasses.replace(factory, num_envs=count, on_success=on_success)
        chosen = list(next(self._waves(adapted)) if indices is None else indices)
        if self._pool is None or self._key != (adapted, chosen):
            self.close()
            first_of_task = range(min(len(chosen), len(factory.task_names))) if self.num_videos else []
            self._pool = EnvPool(adapted, indices=chosen, render=list(first_of_task), timeout_s=self.timeout_s)
            self._key = (adapted, chosen)
        return self._pool

    def _waves(self, factory: EnvFactory) -> Iterator[list[int]]:
        """Env indices that run together: all tasks at once if there are enough envs, else one group of tasks after another."""
        tasks, count = len(factory.task_names), factory.num_envs
        if factory.is_batched or count >= tasks:
            yield list(range(count))
        else:
            for start in range(0, tasks, count):
                yield list(range(start, min(start + count, tasks)))

    @torch.no_grad()
    def run(
        self,
        policy: VLAPolicy,
        factory: EnvFactory,
        split: Split,
        *,
        policy_version: int = 0,
        videos: Path | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> EvaluationResult:
        """Evaluate.

        Args:
            policy: built; acts on its own device.
            factory: the envs.
            split: which seeds: ``validate`` or ``test``.
            policy_version: number of updates behind the policy's weights.
            videos: directory for recordings; none are made without it.
            autocast: makes the context in which the policy acts.

        Raises:
            WorkerError: if an env fails.
        """
        count = self.num_envs or factory.num_envs
        result = EvaluationResult(split, policy_version, [])
        mode = ExplorationType.DETERMINISTIC if self.deterministic else ExplorationType.RANDOM
        was_training = policy.training
        policy.eval()
        with set_exploration_type(mode), autocast():
            for wave in self._waves(dataclasses.replace(factory, num_envs=count)):
                pool = self.open(factory, wave)
                part = _Evaluation(pool, policy, split, self.num_episodes, self.num_videos if videos else 0, videos, policy_version)
                part.run()
                result.episodes += [part.episodes[key] for key in sorted(part.episodes)]
                result.videos += part.files
        policy.train(was_training)
        return result

    def close(self) -> None:
        """End the evaluation envs."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


class _Evaluation:
    """One wave: the envs of a pool share the episodes of their tasks."""

    def __init__(
        self, pool: EnvPool, policy: VLAPolicy, split: Split, count: int, num_videos: int, videos: Path | None, version: int
    ) -> None:
        self.pool, self.policy, self.split, self.version = pool, policy, split, version
        self.videos, self.files = videos, list[Path]()
        self.episodes: dict[tuple[int, int], Episode] = {}
        self._tracker = EpisodeTracker(pool)
        self._frames: dict[int, list[Tensor]] = {}
        self._recordings_left: dict[int, int] = {}
        self._count, self._num_videos = count, num_videos

    def run(self) -> None:
        """Play all episodes. The first reset also tells which task each env runs."""
        pool, num = self.pool, self.pool.num_envs
        pool.reset(torch.ones(num, dtype=torch.bool), torch.full((num,), evaluation_seed(self.split, 0)))
        order = list(dict.fromkeys(pool.tasks))
        self._task_of = [order.index(task) for task in pool.tasks]
        first_env = {self._task_of.index(task) for task in range(len(order))}
        self._recordings_left = dict.fromkeys(first_env, self._num_videos)
        self._waiting = {task: list(range(self._count)) for task in range(len(order))}
        self._playing = torch.full((num,), -1)
        self._decisions = torch.zeros(num, dtype=torch.int64)
        self._begin(range(num))
        while bool((self._playing >= 0).any()):
            self._decide()

    def _seeds(self) -> Tensor:
        return torch.tensor([evaluation_seed(self.split, max(episode, 0)) for episode in self._playing.tolist()])

    def _begin(self, rows: Sequence[int]) -> None:
        """Give each of the rows the next episode of its task, if one is left."""
        started = torch.zeros(self.pool.num_envs, dtype=torch.bool)
        record = torch.zeros_like(started)
        for row in rows:
            queue = self._waiting[self._task_of[row]]
            self._playing[row] = queue.pop(0) if queue else -1
            started[row] = self._playing[row] >= 0
            if started[row] and self._recordings_left.get(row, 0) > 0:
                self._recordings_left[row] -= 1
                record[row] = True
        self._decisions.masked_fill_(started, 0)
        if bool(started.any()):
            self.pool.reset(started, self._seeds(), record)

    def _see(self) -> TensorDict:
        pool, num = self.pool, self.pool.num_envs
        # the key names the task too: two tasks share their seeds, and must not share their noise
        bases = [fold(self.split, pool.tasks[row], int(seed)) for row, seed in enumerate(self._seeds())]
        source = {
            keys.OBSERVATION: TensorDict({name: leaf.clone() for name, leaf in pool.rows.observation.items()}, batch_size=[num]),
            keys.INSTRUCTION_TOKENS: torch.stack([self.policy.tokenize(text) for text in pool.instructions]),
            keys.REQUEST_KEY: (torch.tensor(bases) + self._decisions).unsqueeze(-1),
        }
        return TensorDict(source, batch_size=[num]).to(self.policy.device)

    def _decide(self) -> None:
        active = self._playing >= 0
        chunk = self.policy.act(self._see()).get(keys.CHUNK).float().cpu()
        check_finite(chunk, self.pool)
        self._decisions += active
        seeds = self._seeds()
        for row, frames in self.pool.step(chunk, active).items():
            self._frames.setdefault(row, []).extend(frames)
        ended = self._tracker.after_step(self.pool.tasks, seeds)
        for row, episode in ended.items():
            self.episodes[self._task_of[row], int(self._playing[row])] = episode
            if row in self._frames:
                self._write_video(episode, self._frames.pop(row))
        if ended:
            self._begin(sorted(ended))

    def _write_video(self, episode: Episode, frames: list[Tensor]) -> None:
        from vla_async.monitor.video import write_video

        assert self.videos is not None
        verdict = "success" if episode.success_once else "failure"
        name = f"{self.split}_{self.version:06d}_{episode.task}_{episode.seed}_{verdict}.mp4"
        self.files.append(write_video(self.videos / name, frames))
