"""One row of our own factories on the CPU, in plain numbers: what most env workers step, and the shortest way to a slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_async import keys
from vla_async.collectors.board import Board
from vla_async.collectors.groups import Grouping
from vla_async.collectors.row_env import LENGTH, RETURN, SEED, TASK, Array, FactoryRows
from vla_async.collectors.slab import Key, Slab
from vla_async.collectors.slot_writer import SlotWriter
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
    """

    def __init__(self, env: ChunkedEnv, text_bytes: int, grouping: Grouping | None = None) -> None:
        super().__init__(env, text_bytes, grouping)
        self._row, self._H, self.executed = ChunkRow(env), env.chunk_size, 0
        # what stays the same for a whole episode, what the last decision led to, and whether it has been decided in
        self._fixed: dict[Key, Any] = {}
        self._seen: dict[Key, Array] = {}
        self._led_to: dict[Key, Any] = {}

    @staticmethod
    def suits(env: ChunkedEnv) -> bool:
        """Whether an env is of that kind."""
        return env.num_rows == 1 and env.simulator.device.type == "cpu"

    def restart(self, done: Array, episodes: Array) -> None:
        super().restart(done, episodes)
        self._row.begin()
        self._episode_return, self._episode_length = 0.0, 0
        self._led_to = {}
        self._seen = {("observation", name): _row(value) for name, value in self.env.observed.items()}
        self._fixed = {(keys.INSTRUCTION,): self._instructions[0], TASK: self._tasks[0], SEED: int(self._seeds[0])}
        self._fixed |= {key: int(group[0, 0]) for key, group in self._groups.items()}

    def step_one(self, chunk: Array) -> tuple[dict[Key, Any], bool]:
        """Execute one decision.

        Args:
            chunk: float32 ``[H, A]``.

        Returns:
            What :meth:`step` does, without the dimension of the rows; leaves of one element as plain numbers.
        """
        result = self._row.step(chunk)
        rewards: Any = result.step_rewards
        self.executed = steps = len(rewards)
        total = rewards[0] if self._H == 1 else float(np.array(rewards, np.float32).sum())  # rounded as for many rows
        self._episode_return += total
        self._episode_length += steps
        done = result.terminated or result.truncated
        missing = self._H - steps
        executed: Any = [True] * steps + [False] * missing
        rewards += [0.0] * missing
        if self._H == 1:
            rewards, executed = total, True
        self._led_to = {
            ("success",): result.success,
            ("success_once",): result.success_once,
            ("executed",): executed,
            ("step_rewards",): rewards,
        }
        self._seen = {("observation", name): _row(value) for name, value in result.observation.items()}
        out = {**self._fixed, **self._seen, **self._led_to}
        out[("reward",)], out[RETURN], out[LENGTH] = total, self._episode_return, self._episode_length
        out[("done",)], out[("terminated",)], out[("truncated",)] = done, result.terminated, result.truncated
        return out, done

    def step(self, actions: Mapping[Key, Tensor], active: Array | None = None) -> tuple[dict[Key, Array], Array]:
        out, done = self.step_one(actions[keys.CHUNK][0].numpy())
        types = {leaf.key: leaf for leaf in self.leaves}
        return {key: _as_row(value, types[key].shape) for key, value in out.items()}, np.array([done])

    def current(self) -> dict[Key, Array]:
        seen = {key: value[None] for key, value in self._seen.items()}
        flags = {key: _as_row(value, (-1,)) for key, value in self._led_to.items()} or self._flags
        return seen | flags | {(keys.INSTRUCTION,): self._instructions} | self._groups

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
        self._targets = [(key, _target(key, self._arrays[key]), is_observation) for key, is_observation in self._stepped]

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
        for key, target, is_observation in self._targets:
            target[after if is_observation else at] = outcome[key]
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


def _row(value: Tensor) -> Array:
    array: Array = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()[0]
    return array


def _as_row(value: Any, shape: tuple[int, ...]) -> Array:
    return np.asarray(value).reshape(1, *shape)


def _target(key: Key, rows: Array) -> Any:
    """Where a leaf's values are written: number by number if :meth:`SingleRow.step_one` gives a number."""
    return numbers(rows[:, 0]) if rows.shape[1:] == (1,) and key[0] != keys.OBSERVATION else rows
