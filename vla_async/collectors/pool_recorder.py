"""``PoolRecorder``: looks on while a pool's envs are played in, and hands the episodes that are wanted to a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.collectors.episodes import Episode
from vla_async.collectors.pool import EnvPool
from vla_async.data.trajectories import Key, Trajectory, place_of
from vla_async.data.trajectory_store import MOST_IN_MEMORY, Quota, TrajectoryStore
from vla_async.envs.base import EnvFactory
from vla_async.rng import Split


@dataclass
class _Running:
    """The episode of one row.

    Attributes:
        instruction: its instruction.
        parts: per decision, what was noted of several rows, and the place of this row among them.
        pictures: uint8 ``[height, width, 3]`` per env step, if the env records.
    """

    instruction: str
    parts: list[tuple[dict[Key, Tensor], int]] = field(default_factory=list)
    pictures: list[Tensor] = field(default_factory=list)


class PoolRecorder:
    """Records episodes from their start. Whether one is wanted is known when it has ended, so all that may be are recorded.

    Args:
        pool: the envs.
        store: where to; None records nothing.
        quota: how many are wanted.
        factory: what the pool's envs are of.
        indices: of a factory that is not batched, the env of each row.
        split: which seeds are played.
    """

    def __init__(
        self,
        pool: EnvPool,
        store: TrajectoryStore | None,
        quota: Quota,
        *,
        factory: EnvFactory,
        indices: Sequence[int],
        split: Split,
    ) -> None:
        self.pool, self.store, self.quota, self.split = pool, store, quota, split
        self._factory, self._indices = factory, indices
        self._running: dict[int, _Running] = {}
        self._rows, self._noted = torch.zeros(0, dtype=torch.int64), dict[Key, Tensor]()
        longest = -(-factory.max_episode_steps // factory.chunk_size)
        seen = sum(leaf[0].numel() * leaf.element_size() for leaf in pool.rows.observation.values())
        self._most_rows = max(1, MOST_IN_MEMORY // max(1, longest * seen))

    def begins(self, rows: Iterable[int]) -> None:
        """An episode has begun in these rows; as many are recorded as memory is set aside for."""
        for row in rows:
            self._running.pop(row, None)
            if len(self._running) < self._most_rows and self.quota.may_want(self.pool.tasks[row]):
                self._running[row] = _Running(self.pool.instructions[row])

    def decided(self, answer: TensorDictBase, chunk: Tensor, policy_version: int) -> None:
        """Note what was decided on what, before it is executed.

        Args:
            answer: the policy's, of all rows, on its device.
            chunk: float32 ``[N, H, A]`` on the CPU.
            policy_version: updates behind the policy's weights.
        """
        if not self._running:
            return
        self._rows = rows = torch.tensor(list(self._running))
        there = rows.to(chunk.device if answer.device is None else answer.device)
        given = {(key,): answer.get(key) for key in (keys.LOG_PROB, keys.VALUE) if key in answer.keys()}
        self._noted = {
            **{(keys.OBSERVATION, name): leaf[rows] for name, leaf in self.pool.rows.observation.items()},
            **{key: value[there].detach().float().cpu() for key, value in given.items()},
            keys.CHUNK: chunk[rows],
            (keys.POLICY_VERSION,): torch.full((len(rows), 1), policy_version),
        }

    def stepped(self, frames: Mapping[int, Sequence[Tensor]]) -> None:
        """Note what came of it.

        Args:
            frames: pictures by row, as :meth:`EnvPool.step` gives them.
        """
        if not self._running:
            return
        rows, now = self._rows, self.pool.rows
        flags = (keys.TERMINATED, keys.TRUNCATED, keys.SUCCESS, keys.SUCCESS_ONCE)
        noted = self._noted | {
            keys.STEP_REWARDS: now.step_rewards[rows],
            keys.EXECUTED: now.executed[rows],
            **{key: getattr(now, key[-1])[rows].unsqueeze(-1) for key in flags},
        }
        for place, row in enumerate(rows.tolist()):
            self._running[row].parts.append((noted, place))
            self._running[row].pictures += frames.get(row, ())

    def goes_on(self, ended: Mapping[int, Episode], step: int) -> None:
        """A decision was executed; the rows whose episodes ended have begun their next ones already."""
        self.stepped({})
        self.ends(ended, step)
        self.begins(ended)

    def ends(self, ended: Mapping[int, Episode], step: int) -> None:
        """The episodes of some rows have ended, after ``step`` updates of the run."""
        for row, episode in ended.items():
            running = self._running.pop(row, None)
            if running is None or not self.quota.wants(episode.task, episode.success_once):
                continue
            self.quota.take(episode.task, episode.success_once)
            assert self.store is not None  # else nothing is wanted
            self.store.save(self._trajectory(row, running, episode, step), running.pictures)

    def _trajectory(self, row: int, running: _Running, episode: Episode, step: int) -> Trajectory:
        noted = running.parts[0][0].keys()
        leaves = {key: torch.stack([part[key][place] for part, place in running.parts]) for key in noted}
        final = {name: leaf[row].clone() for name, leaf in self.pool.rows.final_observation.items()}
        is_batched = self._factory.is_batched
        where: dict[str, Any] = place_of(self._factory, 0 if is_batched else self._indices[row], row if is_batched else 0)
        about = {"split": self.split, "instruction": running.instruction, "step": step}
        return Trajectory.of(leaves, final, episode, **about, **where)
