"""``Wave``: the part of an evaluation that a pool of envs plays together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vla_async.collectors.episodes import Episode, EpisodeTracker
from vla_async.collectors.pool import EnvPool
from vla_async.collectors.pool_recorder import PoolRecorder
from vla_async.collectors.view import PolicyView
from vla_async.monitor.video import VideoRecorder
from vla_async.policies.base import VLAPolicy
from vla_async.rng import Split, evaluation_seed, fold


class Wave:
    """The envs of a pool share the episodes of their tasks.

    Args:
        pool: the envs.
        policy: decides.
        split: which seeds.
        policy_version: updates behind the policy's weights.
        count: episodes per task.
        videos: makes videos of some.
        recorder: saves some.

    Attributes:
        episodes: those that have ended, by their task's number and their own.
    """

    def __init__(
        self,
        pool: EnvPool,
        policy: VLAPolicy,
        split: Split,
        policy_version: int,
        count: int,
        videos: VideoRecorder,
        recorder: PoolRecorder,
    ) -> None:
        self.pool, self.policy, self.split, self.version, self.count = pool, policy, split, policy_version, count
        self.videos, self.recorder = videos, recorder
        self.episodes: dict[tuple[int, int], Episode] = {}
        self._tracker, self._view = EpisodeTracker(pool), PolicyView(pool, policy)

    def run(self) -> Iterator[None]:
        """Play all episodes, a decision at a time. The first reset also tells which task each env runs."""
        pool, num = self.pool, self.pool.num_envs
        pool.reset(torch.ones(num, dtype=torch.bool), torch.full((num,), evaluation_seed(self.split, 0)))
        order = list(dict.fromkeys(pool.tasks))
        self._task_of = [order.index(task) for task in pool.tasks]
        self.videos.watch({self._task_of.index(task) for task in range(len(order))})
        self._waiting = {task: list(range(self.count)) for task in range(len(order))}
        self._playing = torch.full((num,), -1)
        self._decisions = torch.zeros(num, dtype=torch.int64)
        self._begin(range(num))
        while bool((self._playing >= 0).any()):
            self._decide()
            yield

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
            record[row] = bool(started[row]) and self.videos.begins(row)
        self._decisions.masked_fill_(started, 0)
        if bool(started.any()):
            self.pool.reset(started, self._seeds(), record)
            self.recorder.begins(torch.nonzero(started).flatten().tolist())

    def _decide(self) -> None:
        active, seeds = self._playing >= 0, self._seeds()
        # the key names the task too: two tasks share their seeds, and must not share their noise
        bases = [fold(self.split, task, seed) for task, seed in zip(self.pool.tasks, seeds.tolist(), strict=True)]
        request_keys = torch.tensor(bases) + self._decisions
        seen = self._view.see(self.pool.rows.observation, self.pool.instructions, request_keys)
        answer = self.policy.act(seen)
        chunk = self._view.chunk(answer)
        self.recorder.decided(answer, chunk, self.version)
        self._decisions += active
        frames = self.pool.step(chunk, active)
        self.recorder.stepped(frames)
        for row, pictures in frames.items():
            self.videos.add(row, pictures)
        ended = self._tracker.after_step(self.pool.tasks, seeds)
        for row, episode in ended.items():
            self.episodes[self._task_of[row], int(self._playing[row])] = episode
            self.videos.ends(row, episode)
        self.recorder.ends(ended, step=self.version)
        if ended:
            self._begin(sorted(ended))
