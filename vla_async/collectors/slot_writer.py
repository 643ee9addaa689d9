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
from vla_async.collectors.wires import clock

Array = NDArray[Any]


class SlotWriter:
    """Couples an env of B rows to the slots they write to. A row writes to one slot at a time.

    Where slots hold fragments, all rows go on together. Where each holds one episode, a row whose episode is over stands
    still until it has a slot for its next one, while the others go on: else those could wait for a slot that is only given
    back after their own episodes.

    Args:
        env: the env.
        slab: where to.
        board: shared bookkeeping.
        rows: the numbers of the env's rows among all rows.

    Attributes:
        env_steps: env steps of the last decision, of all rows.
        reset_at: when rows were last reset after a decision, from when to when; None before, and if somebody says so.
    """

    def __init__(self, env: RowEnv, slab: Slab, board: Board, rows: range) -> None:
        self.env, self.slab, self.board, self.rows = env, slab, board, rows
        part = slice(rows.start, rows.stop)
        self._slot, self._step, self._decisions = board.slot[part], board.step[part], board.decisions[part]
        self._episodes, self._admitted = board.episodes[part], board.admitted[part]
        self._T, self._R = slab.layout.decisions, slab.layout.rows_per_slot
        self._spans = slab.layout.spans_episodes
        leaves = {leaf.key: leaf for leaf in slab.layout.leaves}
        given = {leaf.key for leaf in env.leaves if leaf.key not in env.action_specs}
        self._arrays = {key: _rows_of(slab, key) for key in given}
        # what is known before the first decision; the group, too, so that it is known even of a slot that is lost
        self._observed = [key for key in given if leaves[key].role == "observation" or key == (keys.GROUP_ID,)]
        self._stepped = [(key, leaves[key].role == "observation") for key in given if not leaves[key].carried]
        self._carried = [key for key in given if leaves[key].carried]
        self._carry: dict[Key, Array] = {}
        self._actions = {key: slab.rows(key) for key in env.action_specs}
        self._versions, self._traj_ids = _rows_of(slab, (keys.POLICY_VERSION,)), _rows_of(slab, TRAJ_IDS)
        self._length = slab.length.numpy()
        self.env_steps = 0
        self.reset_at: tuple[float, float] | None = None

    def start(self, seed: int) -> None:
        """Start an episode in all rows; they need slots then."""
        self._slot[:] = -1
        self.env.start(seed, self.rows, self._episodes)
        self._episodes += self._spans
        self._carry = {}

    @property
    def lacking(self) -> bool:
        """Whether some row has no slot."""
        return bool((self._slot < 0).any())

    @property
    def wanted(self) -> int:
        """How many rows may take a slot and have none."""
        return int(self._wanting().sum())

    @property
    def ready(self) -> bool:
        """Whether there is something to decide on."""
        has_slot = self._slot >= 0
        return bool(has_slot.all() if self._spans else has_slot.any())

    def _wanting(self) -> Array:
        wanting: Array = (self._slot < 0) & (self._episodes < self._admitted)
        return wanting

    def give(self, slots: list[int]) -> None:
        """Let rows that want a slot write to these, and write down what their first decision sees."""
        rows = np.flatnonzero(self._wanting())[: len(slots)]
        first = np.asarray(slots) * self._R
        self._versions[first] = UNANSWERED
        seen = self.env.current() | self._carry
        for key in self._observed:
            self._arrays[key][first] = seen[key][rows]
        self.board.cut[slots] = False
        if not self._spans:
            self._traj_ids[first] = self._numbers(rows, self._episodes[rows])
        self._slot[rows], self._step[rows] = slots, 0
        # from here on a slot can be lost with this worker: the replica then reads which episode it was
        self.board.owner[slots] = self.rows.start + rows
        if not self._spans:
            self._episodes[rows] += 1
        self.board.state[slots] = SlotState.ACTING

    def _numbers(self, rows: Array, episodes: Array) -> Array:
        """The trajectory ids of some rows' episodes; no others have them."""
        numbers: Array = self.rows.start + rows + episodes * len(self.board.slot)
        return numbers

    def ask(self) -> None:
        """Count a decision for all rows that have a slot: a request is about to be sent."""
        self._decisions += self._slot >= 0

    def act(self) -> list[int]:
        """Execute the decision that has been written into the slots; returns the rows whose slot is complete now."""
        rows = np.flatnonzero(self._slot >= 0)
        base = self._slot[rows] * self._R + self._step[rows]
        outcome, done = self._execute(rows, base)
        following = np.where(done, base + self._T + 1, base + 1) if self._spans else base + 1
        self._write(outcome, base, following)
        self._traj_ids[base] = self._numbers(rows, self._episodes[rows] - 1)
        self._step[rows] += 1
        over = (self._step[rows] == self._T) | self.board.cut[self._slot[rows]]
        self._carry = {key: self._arrays[key][base + 1] for key in self._carried}
        ended = done if self._spans else done | over  # no slot holds the rest of an episode that was ended early
        if ended.any():
            self._next_episode(rows[ended], base[ended], following[ended])
        rows = rows[over if self._spans else ended]
        self._length[self._slot[rows]] = self._step[rows]
        return [int(row) for row in rows]

    def _execute(self, rows: Array, base: Array) -> tuple[dict[Key, Array], Array]:
        """Step the env; what it gives for the rows that take part."""
        where = torch.from_numpy(base)
        actions = {key: torch.index_select(source, 0, where) for key, source in self._actions.items()}
        if len(rows) == len(self.rows):
            outcome, done = self.env.step(actions)
            self.env_steps = self.env.count(outcome)
            return outcome, done
        active = np.zeros(len(self.rows), bool)
        active[rows] = True
        spread = {key: action.new_zeros(len(active), *action.shape[1:]) for key, action in actions.items()}
        for key, action in actions.items():
            spread[key][torch.from_numpy(rows)] = action
        outcome, done = self.env.step(spread, active)
        self.env_steps = self.env.count(outcome)
        return {key: value[rows] for key, value in outcome.items()}, done[rows]

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

    def _next_episode(self, rows: Array, base: Array, following: Array) -> None:
        """Restart the rows whose episodes have ended with the decisions ``base``."""
        done = np.zeros(len(self.rows), bool)
        done[rows] = True
        began = clock()
        self.env.restart(done, self._episodes)
        self.reset_at = began, clock()
        if not self._spans:  # the row takes a slot first, and counts the episode then
            return
        self._episodes += done
        seen = self.env.current()
        for key in self._carried:
            self._arrays[key][following] = self._carry[key][rows]
            self._carry[key] = np.where(_expand(done, seen[key]), seen[key], self._carry[key])
        for key in self._observed:
            self._arrays[key][base + 1] = seen[key][rows]


def _rows_of(slab: Slab, key: Key) -> Array:
    return numpy_rows(slab.rows(key))


def numpy_rows(rows: Tensor) -> Array:
    """Rows as an array on the same memory; bfloat16 as its bits."""
    array: Array = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array


def _expand(flags: Array, like: Array) -> Array:
    return flags.reshape(-1, *[1] * (like.ndim - 1))
