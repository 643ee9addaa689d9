"""One row of our own factories on the CPU, in plain numbers: what most env workers step, and the shortest way to a slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vla_async import keys
from vla_async.collectors.board import Board
from vla_async.collectors.groups import Grouping
from vla_async.collectors.row_env import GROUP, LENGTH, RETURN, SEED, TASK, Array, FactoryRows
from vla_async.collectors.slab import Key, Slab
from vla_async.collectors.slot_writer import SlotWriter, numpy_rows
from vla_async.envs.chunk_row import ChunkRow
from vla_async.envs.chunked import ChunkedEnv
from vla_async.shared_memory import numbers


class SingleRow(FactoryRows):
    """As :class:`FactoryRows`, for an env of one row on the CPU.

    Args:
        env: is closed with this object.
        text_bytes: longest instruction or task name.
        grouping: as for :class:`FactoryRows`.

    Attributes:
        executed: env steps of the last decision.
        order: the leaves that :meth:`step_one` gives.
    """

    def __init__(self, env: ChunkedEnv, text_bytes: int, grouping: Grouping | None = None) -> None:
        super().__init__(env, text_bytes, grouping)
        self._row, self._H, self.executed = ChunkRow(env), env.chunk_size, 0
        self._names = list(env.observed)
        self.order: list[Key] = [("observation", name) for name in self._names]
        self.order += [("success",), ("success_once",), ("executed",), ("step_rewards",), ("reward",)]
        self.order += [("done",), ("terminated",), ("truncated",), RETURN, LENGTH]
        self.order += [(keys.INSTRUCTION,), TASK, SEED] + ([GROUP] if grouping else [])
        shapes = {leaf.key: leaf.shape for leaf in self.leaves}
        self._shapes = [shapes[key] for key in self.order]
        self._flag_keys = self.order[len(self._names) : len(self._names) + 4]

    @staticmethod
    def suits(env: ChunkedEnv) -> bool:
        """Whether an env is of that kind."""
        return env.num_rows == 1 and env.simulator.device.type == "cpu"

    def restart(self, done: Array, episodes: Array) -> None:
        super().restart(done, episodes)
        self._row.begin()
        self._episode_return, self._episode_length = 0.0, 0
        self._led_to: list[Any] = []
        self._seen = [numpy_rows(self.env.observed[name])[0] for name in self._names]
        self._fixed = [self._instructions[0], self._tasks[0], int(self._seeds[0])]
        self._fixed += [int(group[0, 0]) for group in self._groups.values()]

    def step_one(self, chunk: Array) -> tuple[list[Any], bool]:
        """Execute one decision.

        Args:
            chunk: float32 ``[H, A]``.

        Returns:
            What :meth:`step` does, in the order of :attr:`order`, without the dimension of the rows; leaves of one element
            other than observations as plain numbers.
        """
        result = self._row.step(chunk)
        rewards: Any = result.step_rewards
        self.executed = steps = len(rewards)
        executed: Any = True
        if self._H == 1:
            rewards = total = rewards[0]
        else:
            missing = self._H - steps
            rewards, executed = rewards + [0.0] * missing, [True] * steps + [False] * missing
            total = float(np.array(rewards, np.float32).sum())  # rounded as for many rows, so with the zeros
        self._episode_return += total
        self._episode_length += steps
        observation, terminated, truncated = result.observation, result.terminated, result.truncated
        self._seen = [numpy_rows(observation[name])[0] for name in self._names]
        self._led_to = [result.success, result.success_once, executed, rewards]
        done = terminated or truncated
        outcome = [total, done, terminated, truncated, self._episode_return, self._episode_length]
        return self._seen + self._led_to + outcome + self._fixed, done

    def step(self, actions: Mapping[Key, Tensor], active: Array | None = None) -> tuple[dict[Key, Array], Array]:
        out, done = self.step_one(actions[keys.CHUNK][0].float().numpy())
        rows = [_as_row(value, shape) for value, shape in zip(out, self._shapes, strict=True)]
        return dict(zip(self.order, rows, strict=True)), np.array([done])

    def current(self) -> dict[Key, Array]:
        seen = {key: value[None] for key, value in zip(self.order, self._seen, strict=False)}
        flags = {key: _as_row(value, (-1,)) for key, value in zip(self._flag_keys, self._led_to, strict=False)}
        return seen | (flags or self._flags) | {(keys.INSTRUCTION,): self._instructions} | self._groups

    def count(self, outcome: Mapping[Key, Array]) -> int:
        return int(np.sum(outcome[("executed",)]))


class SingleRowWriter(SlotWriter):
    """As :class:`SlotWriter`, for a :class:`SingleRow`: the shared arrays are read and written number by number."""

    env: SingleRow

    def __init__(self, env: SingleRow, slab: Slab, board: Board, rows: range) -> None:
        super().__init__(env, slab, board, rows)
        self._number, self._num_rows = rows.start, len(board.slot)
        self._slots, self._steps, self._asked = map(numbers, (self._slot, self._step, self._decisions))
        self._begun, self._may_begin, self._cut = map(numbers, (self._episodes, self._admitted, board.cut))
        self._lengths, self._numbers_of = numbers(self._length), numbers(self._traj_ids)
        self._chunks: Array = slab.rows(keys.CHUNK).numpy()
        stepped = dict(self._stepped)
        # where each value of a step goes; None for a state that the policy carries on itself
        self._targets = [(_target(key, self._arrays[key]), stepped[key]) if key in stepped else None for key in env.order]

    @property
    def lacking(self) -> bool:
        return bool(self._slots[0] < 0)

    @property
    def wanted(self) -> int:
        return int(self._slots[0] < 0 and self._begun[0] < self._may_begin[0])

    @property
    def ready(self) -> bool:
        return bool(self._slots[0] >= 0)

    def ask(self) -> None:
        self._asked[0] += 1

    def act(self) -> list[int]:
        slot, step = self._slots[0], self._steps[0]
        at = slot * self._R + step
        outcome, done = self.env.step_one(self._chunks[at])
        after = at + self._T + 1 if done and self._spans else at + 1
        for target, value in zip(self._targets, outcome, strict=True):
            if target is not None:
                target[0][after if target[1] else at] = value
        self._numbers_of[at] = self._number + (self._begun[0] - 1) * self._num_rows
        self._steps[0] = step = step + 1
        self.env_steps = self.env.executed
        over = step == self._T or self._cut[slot]
        if self._carried:
            self._carry = {key: self._arrays[key][at + 1 : at + 2].copy() for key in self._carried}
        ended = done if self._spans else done or over  # no slot holds the rest of an episode that was ended early
        if ended:
            self._next_episode(np.zeros(1, np.int64), np.array([at]), np.array([after]))
        if over if self._spans else ended:
            self._lengths[slot] = step
            return [0]
        return []


def _as_row(value: Any, shape: tuple[int, ...]) -> Array:
    return np.asarray(value).reshape(1, *shape)


def _target(key: Key, rows: Array) -> Any:
    """Where a leaf's values are written: number by number if :meth:`SingleRow.step_one` gives a number."""
    return numbers(rows[:, 0]) if rows.shape[1:] == (1,) and key[0] != keys.OBSERVATION else rows
