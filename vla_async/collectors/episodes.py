"""Episodes: what is known of one that has ended, and the adding up of those that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vla_async.collectors.pool import EnvPool
from vla_async.envs.base import EnvFactory
from vla_async.monitor import metric_table as names
from vla_async.monitor.metrics import mean


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    Attributes:
        task: its task name.
        seed: the seed that fixed its initial state.
        success_once: success at any env step.
        success_at_end: success after its last env step.
        episode_return: undiscounted sum of the rewards of all executed env steps.
        env_steps: its length.
    """

    task: str
    seed: int
    success_once: bool
    success_at_end: bool
    episode_return: float
    env_steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class EpisodeTracker:
    """Adds up the running episode of each row of a pool and hands out those that ended."""

    def __init__(self, pool: EnvPool) -> None:
        self.pool = pool
        self.returns = torch.zeros(pool.num_envs, dtype=torch.float64)
        self.lengths = torch.zeros(pool.num_envs, dtype=torch.int64)

    def clear(self, rows: Tensor) -> None:
        """Forget the running episodes of ``rows`` (bool ``[N]``)."""
        self.returns.masked_fill_(rows, 0.0)
        self.lengths.masked_fill_(rows, 0)

    def after_step(self, tasks: list[str], seeds: Tensor) -> dict[int, Episode]:
        """Account for a decision that the pool has just executed; returns the ended episodes by row.

        Args:
            tasks: task of each row before the decision (a reset may have changed it since).
            seeds: int64 ``[N]``, seed of the episode that each row was in.
        """
        rows = self.pool.rows
        self.returns += torch.where(rows.active, rows.step_rewards.sum(-1), 0.0)
        self.lengths += torch.where(rows.active, rows.executed.sum(-1), 0)
        done = (rows.terminated | rows.truncated) & rows.active
        ended = {}
        for row in torch.nonzero(done).flatten().tolist():
            ended[row] = Episode(
                task=tasks[row],
                seed=int(seeds[row]),
                success_once=bool(rows.success_once[row]),
                success_at_end=bool(rows.success[row]),
                episode_return=float(self.returns[row]),
                env_steps=int(self.lengths[row]),
            )
        self.clear(done)
        return ended


def rollout_metrics(episodes: Sequence[Episode], env: EnvFactory) -> dict[str, float]:
    """What the training episodes say that ended, over all and by task if the envs have several; nothing if none did."""
    if not episodes:
        return {}
    metrics = _means(episodes)
    if len(env.task_names) > 1:
        for task in sorted({episode.task for episode in episodes}):
            metrics |= _means([episode for episode in episodes if episode.task == task], task)
    return metrics


def _means(episodes: Sequence[Episode], *task: str) -> dict[str, float]:
    return {
        names.ROLLOUT_EPISODES.of(*task): float(len(episodes)),
        names.ROLLOUT_SUCCESS_ONCE.of(*task): mean(episode.success_once for episode in episodes),
        names.ROLLOUT_SUCCESS_AT_END.of(*task): mean(episode.success_at_end for episode in episodes),
        names.ROLLOUT_RETURN.of(*task): mean(episode.episode_return for episode in episodes),
        names.ROLLOUT_LENGTH.of(*task): mean(episode.env_steps for episode in episodes),
    }
