"""``SlotRecorder``: puts training episodes together from the slots that updates consume, and saves those that are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_async import keys
from vla_async.collectors.episodes import Episode
from vla_async.collectors.row_env import LENGTH, RETURN, SEED, TASK
from vla_async.collectors.slab import TRAJ_IDS, Slab, read_texts
from vla_async.collectors.wires import EnvAddress
from vla_async.data.trajectories import Key, Trajectory, place_of
from vla_async.data.trajectory_store import MOST_IN_MEMORY, Quota, TrajectoryStore
from vla_async.envs.base import EnvFactory


@dataclass(frozen=True)
class _Part:
    """What one slot holds of one episode.

    Attributes:
        here: int64 ``[t]``, the rows of its decisions.
        following: int64 ``[t]``, the rows of what they led to.
        row: the env row that it was played in.
        number: of its trajectory; no other one has it.
        began: env steps of the episode before it.
        ended: env steps of the episode after it.
        is_last: whether the episode ends with it.
        task: its task.
    """

    here: Tensor
    following: Tensor
    row: int
    number: int
    began: int
    ended: int
    is_last: bool
    task: str


@dataclass
class _Growing:
    """An episode of which some fragments are there."""

    number: int
    ended: int
    leaves: list[dict[Key, Tensor]]


class SlotRecorder:
    """Follows the episodes of all rows, fragment by fragment, from a start to an end, as long as some are wanted.

    An episode of which a fragment was dropped, or comes out of its turn, is skipped and counted.

    Args:
        slab: where the slots are.
        envs: which rows each env has.
        factory: what they are of.
        store: where to; None saves nothing.
    """

    def __init__(self, slab: Slab, envs: Sequence[EnvAddress], factory: EnvFactory, store: TrajectoryStore | None) -> None:
        self.slab, self.envs, self.factory, self.store = slab, envs, factory, store
        self.quota = Quota(None if store is None else store.recording, of_training=True)
        self._num_rows = sum(len(env.rows) for env in envs)
        self._growing: dict[int, _Growing] = {}  # by row
        layout = slab.layout
        self._seen = [leaf.key for leaf in layout.leaves if leaf.role == "observation" and leaf.key[0] == keys.OBSERVATION]
        self._given = [key for key in ((keys.LOG_PROB,), (keys.VALUE,)) if key in layout.fields]
        nbytes = sum(slab.rows(key)[0].nbytes for key in self._seen)
        self._most_rows = max(1, MOST_IN_MEMORY // max(1, nbytes * -(-factory.max_episode_steps // factory.chunk_size)))

    def begin(self, version: int) -> None:
        """An update begins, of weights of this version."""
        self._version = version
        self.quota.begin(version)

    def add(self, slots: Sequence[int]) -> None:
        """Look at slots that the update has taken, while nobody writes to them."""
        if not any(map(self.quota.may_want, self.factory.task_names)):
            self._growing.clear()
            return
        for slot in slots:
            for part in self._parts(slot):
                self._add(part)

    def _parts(self, slot: int) -> Iterator[_Part]:
        """The parts of episodes in a slot, in their order."""
        slab, length = self.slab, int(self.slab.length[slot])
        first, following = slot * slab.layout.rows_per_slot, slab.next_rows(torch.tensor([slot]))[0]
        done = slab.rows(keys.DONE[1:])[first : first + length, 0]
        ends = [end + 1 for end in torch.nonzero(done).flatten().tolist()]
        for start, stop in zip([0, *ends], [*ends, length], strict=True):
            if start == stop:
                continue
            here, after = torch.arange(first + start, first + stop), following[start:stop]
            number = int(slab.rows(TRAJ_IDS)[first + start])
            yield _Part(
                here=here,
                following=after,
                row=number % self._num_rows,
                number=number,
                began=int(slab.rows(LENGTH)[first + start]) - int(slab.rows(keys.EXECUTED[1:])[after[0]].sum()),
                ended=int(slab.rows(LENGTH)[first + stop - 1]),
                is_last=bool(done[stop - 1]),
                task=self._text(TASK, first + start),
            )

    def _add(self, part: _Part) -> None:
        """Take a part to those that are there of its episode."""
        growing = self._growing.get(part.row)
        if growing is not None and (growing.number, growing.ended) != (part.number, part.began):
            assert self.store is not None  # else nothing grows
            self.store.skipped["a part of the episode was dropped"] += 1
            del self._growing[part.row]
            growing = None
        if not self.quota.may_want(part.task):
            self._growing.pop(part.row, None)
            return
        if growing is None:
            if part.began > 0 or len(self._growing) >= self._most_rows:
                return
            growing = self._growing[part.row] = _Growing(part.number, 0, [])
        if part.is_last:
            self._finish(self._growing.pop(part.row), part)
            return
        growing.leaves.append(self._read(part))
        growing.ended = part.ended

    def _finish(self, growing: _Growing, last: _Part) -> None:
        """Save an episode whose last part has come, if it is wanted as it ended."""
        slab, end, final = self.slab, int(last.here[-1]), int(last.following[-1])
        episode = Episode(
            task=last.task,
            seed=int(slab.rows(SEED)[end]),
            success_once=bool(slab.rows(keys.SUCCESS_ONCE[1:])[final]),
            success_at_end=bool(slab.rows(keys.SUCCESS[1:])[final]),
            episode_return=float(slab.rows(RETURN)[end]),
            env_steps=last.ended,
        )
        if not self.quota.wants(episode.task, episode.success_once):
            return
        self.quota.take(episode.task, episode.success_once)
        parts = [*growing.leaves, self._read(last)]
        leaves = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        observation = {key[1]: slab.rows(key)[final].clone() for key in self._seen}
        about = {"split": "train", "instruction": self._text((keys.INSTRUCTION,), end), "step": self._version}
        assert self.store is not None  # else nothing is wanted
        self.store.save(Trajectory.of(leaves, observation, episode, **about, **self._place(last.row)))

    def _read(self, part: _Part) -> dict[Key, Tensor]:
        """A copy of what is saved of a part, by key ``[t, ...]``."""
        rows = self.slab.rows
        decided = [*self._seen, *self._given, (keys.POLICY_VERSION,), keys.CHUNK]
        led_to = [keys.STEP_REWARDS, keys.EXECUTED, keys.SUCCESS, keys.SUCCESS_ONCE]
        leaves = {key: rows(key)[part.here] for key in decided}
        leaves |= {key: rows(key[1:])[part.here] for key in (keys.TERMINATED, keys.TRUNCATED)}
        leaves |= {key: rows(key[1:])[part.following] for key in led_to}
        return {key: leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf for key, leaf in leaves.items()}

    def _text(self, key: Key, row: int) -> str:
        text: str = read_texts(self.slab.rows(key)[row : row + 1], (1,)).tolist()[0]
        return text

    def _place(self, row: int) -> dict[str, Any]:
        """Where an episode was played: the env that has the row, which of a batch in several stages is one of these."""
        rows = next(env.rows for env in self.envs if row in env.rows)
        factory = dataclasses.replace(self.factory, num_envs=len(rows)) if self.factory.is_batched else self.factory
        return place_of(factory, rows.start, row - rows.start)
