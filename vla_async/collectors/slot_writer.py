"""``SlotWriter``: writes what one env does into the slots of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_async import keys
from vla_async.collectors.board import Board, SlotState
from vla_async.collectors.row_env import RowEnv
from vla_async.collectors.slab import TRAJ_IDS, UNANSWERED, Key, Slab

Array = NDArray[Any]


class SlotWriter:
    """Couples an env of B rows to the slots they write to. A row writes to one slot at a time.

    Args:
        env: the env.
        slab: where to.
        board: shared bookkeeping.
        rows: the numbers of the env's rows among all rows.

    Attributes:
        env_steps: env steps of the last decision, of all rows.
    """

    def __init__(self, env: RowEnv, slab: Slab, board: Board, rows: range) -> None:
        self.env, self.slab, self.board, self.rows = env, slab, board, rows
        part = slice(rows.start, rows.stop)
        self._slot, self._step, self._decisions = board.slot[part], board.step[part], board.decisions[part]
        self._episodes = board.episodes[part]
        self._T, self._R = slab.layout.decisions, slab.layout.rows_per_slot
        self._spans = slab.layout.spans_episodes
        leaves = {leaf.key: leaf for leaf in slab.layout.leaves}
        given = {leaf.key for leaf in env.leaves if leaf.key not in env.action_specs}
        self._arrays = {key: _rows_of(slab, key) for key in given}
        self._observed = [key for key in given if leaves[key].role == "observation"]
        self._stepped = [(key, leaves[key].role == "observation") for key in given if not leaves[key].carried]
        self._carried = [key for key in given if leaves[key].carried]
        self._carry: dict[Key, Array] = {}
        self._actions = {key: slab.rows(key) for key in env.action_specs}
        self._versions, self._traj_ids = _rows_of(slab, (keys.POLICY_VERSION,)), _rows_of(slab, TRAJ_IDS)
        self._length = slab.length.numpy()
        self.env_steps = 0

    def start(self, seed: int) -> None:
        """Start an episode in all rows; they need slots then."""
        self._slot[:] = -1
        self.env.start(seed, self.rows, self._episodes)
        self._episodes += 1
        self._carry = {}

    @property
    def lacking(self) -> int:
        """How many rows have no slot."""
        return int((self._slot < 0).sum())

    def give(self, slots: list[int]) -> None:
        """Let rows that have no slot write to these, and write down what their first decision sees."""
        rows = np.flatnonzero(self._slot < 0)[: len(slots)]
        self._slot[rows], self._step[rows] = slots, 0
        self.board.cut[slots] = False
        first = self._slot[rows] * self._R
        self._versions[first] = UNANSWERED
        seen = self.env.current() | self._carry
        for key in self._observed:
            self._arrays[key][first] = seen[key][rows]
        self.board.state[slots] = SlotState.ACTING

    def ask(self) -> None:
        """Count a decision for all rows: a request is about to be sent."""
        self._decisions += 1

    def act(self) -> list[int]:
        """Execute the decision that has been written into the slots; returns the rows whose slot is complete now."""
        base = self._slot * self._R + self._step
        where = torch.from_numpy(base)
        outcome, done = self.env.step({key: torch.index_select(rows, 0, where) for key, rows in self._actions.items()})
        following = np.where(done, base + self._T + 1, base + 1) if self._spans else base + 1
        self.env_steps = self.env.count(outcome)
        self._write(outcome, base, following)
        self._traj_ids[base] = np.arange(self.rows.start, self.rows.stop) + (self._episodes - 1) * len(self.board.slot)
        self._step += 1
        over = self._step == self._T
        self._carry = {key: self._arrays[key][base + 1] for key in self._carried}
        if done.any():
            self._next_episode(done, base, following)
            if not self._spans:
                over |= done
        over |= self.board.cut[self._slot]
        if not over.any():
            return []
        self._length[self._slot[over]] = self._step[over]
        return [int(row) for row in np.flatnonzero(over)]

    def slot_of(self, row: int) -> int:
        """The slot that a row of the env writes to."""
        return int(self._slot[row])

    def leave(self, row: int) -> None:
        """Let a row go on without its slot: somebody else has it now."""
        self._slot[row] = -1

    def _write(self, outcome: dict[Key, Array], base: Array, following: Array) -> None:
        if len(base) == 1:  # plain numbers index faster than arrays
            at, after = int(base[0]), int(following[0])
            for key, is_observation in self._stepped:
                self._arrays[key][after if is_observation else at] = outcome[key][0]
        else:
            for key, is_observation in self._stepped:
                self._arrays[key][following if is_observation else base] = outcome[key]

    def _next_episode(self, done: Array, base: Array, following: Array) -> None:
        self.env.restart(done, self._episodes)
        self._episodes += done
        seen = self.env.current()
        for key in self._carried:
            self._arrays[key][following[done]] = self._carry[key][done]
            self._carry[key] = np.where(_expand(done, seen[key]), seen[key], self._carry[key])
        if self._spans:
            for key in self._observed:
                self._arrays[key][base[done] + 1] = seen[key][done]


def _rows_of(slab: Slab, key: Key) -> Array:
    return numpy_rows(slab.rows(key))


def numpy_rows(rows: Tensor) -> Array:
    """Rows as an array on the same memory; bfloat16 as its bits."""
    array: Array = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array


def _expand(flags: Array, like: Array) -> Array:
    return flags.reshape(-1, *[1] * (like.ndim - 1))
