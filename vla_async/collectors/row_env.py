"""Any env as rows of plain arrays: ``FactoryRows`` is the short way (our own factories), ``EnvBaseRows`` the general one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, NonTensor, TensorSpec
from torchrl.envs import EnvBase

from vla_async import keys
from vla_async.collectors.groups import Grouping
from vla_async.collectors.slab import Key, Leaf, write_text
from vla_async.envs.base import EnvSpec
from vla_async.rng import TRAIN_SEEDS, episode_seed, fold

if TYPE_CHECKING:
    from vla_async.envs.chunked import ChunkedEnv

Array = NDArray[Any]
TASK: Key = ("collector", "task")
SEED: Key = ("collector", "seed")
RETURN: Key = ("collector", "episode_return")  # of the episode so far, this decision included
LENGTH: Key = ("collector", "episode_env_steps")
GROUP: Key = (keys.GROUP_ID,)


class RowEnv(ABC):
    """B rows of an env, as arrays ``[B, ...]`` by key.

    Attributes:
        num_rows: B.
        leaves: what it gives, and the actions that it takes (role ``decision``).
        action_specs: the actions that one row takes.
        env_spec: what a policy has to know, if the env is one of our own.
        text_bytes: longest text, in UTF-8.
    """

    num_rows: int
    leaves: tuple[Leaf, ...]
    action_specs: dict[Key, TensorSpec]
    env_spec: EnvSpec | None = None

    def __init__(self, text_bytes: int) -> None:
        self.text_bytes = text_bytes
        self._texts: dict[str, Array] = {}

    @abstractmethod
    def start(self, seed: int, rows: range, episodes: Array) -> None:
        """Start an episode in all rows.

        Args:
            seed: root of the random streams.
            rows: the rows' numbers among all rows of the run.
            episodes: int64 ``[B]``, the episodes that each row has had before.
        """

    @abstractmethod
    def step(self, actions: Mapping[Key, Tensor], active: Array | None = None) -> tuple[dict[Key, Array], Array]:
        """Execute one decision.

        Args:
            actions: of all rows, by key.
            active: bool ``[B]``, the rows that take part; all by default, and always where slots hold fragments.

        Returns:
            Observations (as they are before any reset) and outcomes by key, and which rows' episodes ended, bool ``[B]``.
        """

    @abstractmethod
    def restart(self, done: Array, episodes: Array) -> None:
        """Start the next episode in the rows of ``done``; ``episodes`` is as for :meth:`start`."""

    @abstractmethod
    def current(self) -> dict[Key, Array]:
        """What is known of each row before its next decision: observations by key, and its group if it is in one."""

    def count(self, outcome: Mapping[Key, Array]) -> int:
        """The env steps of one decision of all rows."""
        return self.num_rows

    @abstractmethod
    def close(self) -> None:
        """Close the env."""

    def _encoded(self, texts: list[str]) -> Array:
        """Texts as UTF-8 rows ``[B, bytes]``."""
        for text in set(texts) - self._texts.keys():
            row = torch.zeros(self.text_bytes, dtype=torch.uint8)
            write_text(text, row)
            self._texts[text] = row.numpy()
        return self._texts[texts[0]][None] if len(texts) == 1 else np.stack([self._texts[text] for text in texts])


class FactoryRows(RowEnv):
    """An env of an :class:`EnvFactory`, stepped without TensorDicts.

    Args:
        env: is closed with this object.
        text_bytes: longest instruction or task name.
        grouping: which rows share their episodes' seeds, and are told apart by a group id; None for none.
    """

    def __init__(self, env: ChunkedEnv, text_bytes: int, grouping: Grouping | None = None) -> None:
        super().__init__(text_bytes)
        self.env, self.num_rows, self.env_spec, self.grouping = env, env.num_rows, env.env_spec, grouping
        H, A = env.chunk_size, env.env_spec.action_dim
        flags = ("success", "success_once")
        self.leaves = (
            *(Leaf(("observation", name), tuple(v.shape[1:]), v.dtype, "observation") for name, v in env.observed.items()),
            Leaf((keys.INSTRUCTION,), (text_bytes,), torch.uint8, "observation", is_text=True),
            *(Leaf((name,), (1,), torch.bool, "observation") for name in flags),
            Leaf(("executed",), (H,), torch.bool, "observation"),
            Leaf(("step_rewards",), (H,), torch.float32, "observation"),
            Leaf(("reward",), (1,), torch.float32, "outcome"),
            *(Leaf((name,), (1,), torch.bool, "outcome") for name in ("done", "terminated", "truncated")),
            Leaf(TASK, (text_bytes,), torch.uint8, "decision", is_text=True),
            Leaf(SEED, (1,), torch.int64, "decision"),
            Leaf(RETURN, (1,), torch.float64, "decision"),
            Leaf(LENGTH, (1,), torch.int64, "decision"),
            Leaf(keys.CHUNK, (H, A), torch.float32, "decision"),
        )
        if grouping is not None:
            self.leaves += (Leaf(GROUP, (1,), torch.int64, "decision"),)
        bounds = [torch.tensor(bound).expand(H, A) for bound in (env.env_spec.action_low, env.env_spec.action_high)]
        self.action_specs = {keys.CHUNK: Bounded(*bounds, shape=(H, A))}
        self._flags: dict[Key, Array] = {(name,): np.zeros((self.num_rows, 1), bool) for name in flags}
        self._flags |= {("executed",): np.zeros((self.num_rows, H), bool)}
        self._flags |= {("step_rewards",): np.zeros((self.num_rows, H), np.float32)}

    def start(self, seed: int, rows: range, episodes: Array) -> None:
        self._seed, self._rows = seed, rows
        self._seeds = np.zeros(self.num_rows, np.int64)
        self._groups: dict[Key, Array] = {}
        if self.grouping is not None:
            self._groups[GROUP] = np.zeros((self.num_rows, 1), np.int64)
        self._return, self._length = np.zeros((self.num_rows, 1)), np.zeros((self.num_rows, 1), np.int64)
        self.restart(np.ones(self.num_rows, bool), episodes)

    def restart(self, done: Array, episodes: Array) -> None:
        for row in np.flatnonzero(done).tolist():
            stream, episode = self._rows[row], int(episodes[row])
            if self.grouping is not None:
                stream = self.grouping.group_of(stream)
                self._groups[GROUP][row] = self.grouping.id_of(stream, episode)
            self._seeds[row] = episode_seed(self._seed, stream, episode)
        on = self.env.simulator.device
        self.env.reset_rows(torch.from_numpy(done).to(on), torch.from_numpy(self._seeds).to(on))
        self._return[done], self._length[done] = 0.0, 0
        self._flags = {key: value * ~done[:, None] for key, value in self._flags.items()}
        self._instructions = self._encoded(list(self.env.simulator.instructions))
        self._tasks = self._encoded(list(self.env.simulator.tasks))

    def step(self, actions: Mapping[Key, Tensor], active: Array | None = None) -> tuple[dict[Key, Array], Array]:
        on = self.env.simulator.device
        rows = None if active is None else torch.from_numpy(active).to(on)
        result = self.env.step_chunk(actions[keys.CHUNK].to(on), rows)
        rewards = _array(result.step_rewards)
        terminated, truncated = _array(result.terminated), _array(result.truncated)
        done = terminated | truncated
        self._flags = {
            ("success",): _array(result.success)[:, None],
            ("success_once",): _array(result.success_once)[:, None],
            ("executed",): _array(result.executed),
            ("step_rewards",): rewards,
        }
        out = {("observation", name): _array(value) for name, value in result.observation.items()} | self._flags
        out[(keys.INSTRUCTION,)], out[TASK], out[SEED] = self._instructions, self._tasks, self._seeds[:, None]
        out[("reward",)] = rewards.sum(-1, keepdims=True)
        self._return += out[("reward",)]
        self._length += out[("executed",)].sum(-1, keepdims=True)
        out[RETURN], out[LENGTH] = self._return, self._length
        out[("done",)], out[("terminated",)], out[("truncated",)] = done[:, None], terminated[:, None], truncated[:, None]
        return out | self._groups, done

    def current(self) -> dict[Key, Array]:
        seen: dict[Key, Array] = {("observation", name): _array(value) for name, value in self.env.observed.items()}
        return seen | self._flags | {(keys.INSTRUCTION,): self._instructions} | self._groups

    def count(self, outcome: Mapping[Key, Array]) -> int:
        return int(outcome[("executed",)].sum())

    def close(self) -> None:
        self.env.close()


class EnvBaseRows(RowEnv):
    """Any TorchRL ``EnvBase``, stepped by ``step_and_maybe_reset``. Batch dimensions are flattened to rows.

    Args:
        make: builds the env, which is closed with this object.
        text_bytes: longest text.

    Raises:
        ValueError: if the env has no ``"done"`` at its root, or gives something that is neither a tensor nor a text.
    """

    def __init__(self, make: Callable[[], EnvBase], text_bytes: int) -> None:
        super().__init__(text_bytes)
        self.env = make()
        if not isinstance(self.env, EnvBase):
            raise ValueError(f"create_env_fn gave {type(self.env).__name__}; it must return a TorchRL EnvBase")
        self.num_rows, self._dims = math.prod(self.env.batch_size), len(self.env.batch_size)
        if "done" not in self.env.done_keys:
            raise ValueError(f"the env's done keys are {self.env.done_keys}; one of them must be 'done' at the root")
        self._specs: dict[Key, Any] = {_tuple(k): s for k, s in self.env.full_observation_spec.items(True, True)}
        observed = [self._leaf(key, spec, "observation") for key, spec in self._specs.items()]
        outcomes = {**_items(self.env.full_reward_spec), **_items(self.env.full_done_spec)}
        given = [self._leaf(key, spec, "outcome") for key, spec in outcomes.items()]
        actions = [self._leaf(key, spec, "decision") for key, spec in _items(self.env.full_action_spec).items()]
        self.leaves = (*observed, *given, *actions)
        self.action_specs = {key: spec[(0,) * self._dims] for key, spec in _items(self.env.full_action_spec).items()}
        self._given = tuple(leaf for leaf in self.leaves if leaf.role != "decision")

    def _leaf(self, key: Key, spec: Any, role: Any) -> Leaf:
        if isinstance(spec, NonTensor):
            return Leaf(key, (self.text_bytes,), torch.uint8, role, is_text=True)
        return Leaf(key, tuple(spec.shape[self._dims :]), spec.dtype, role)

    def start(self, seed: int, rows: range, episodes: Array) -> None:
        # an env of its own seeds its episodes one after the other, so one that starts again must not repeat them
        self.env.set_seed(fold(seed, "env", rows.start, int(episodes[0])) % TRAIN_SEEDS)
        self._td = self.env.reset()

    def step(self, actions: Mapping[Key, Tensor], active: Array | None = None) -> tuple[dict[Key, Array], Array]:
        for key, action in actions.items():
            self._td.set(key, action.reshape(*self.env.batch_size, *action.shape[1:]).to(self.env.device, copy=True))
        stepped, self._td = self.env.step_and_maybe_reset(self._td)
        following = stepped.get("next")
        out = {leaf.key: self._read(following, leaf) for leaf in self._given}
        done: Array = np.asarray(out[("done",)].reshape(self.num_rows, -1).any(-1))
        return out, done

    def restart(self, done: Array, episodes: Array) -> None:
        """Nothing is left to do: ``step_and_maybe_reset`` has done it."""

    def current(self) -> dict[Key, Array]:
        return {leaf.key: self._read(self._td, leaf) for leaf in self._given if leaf.role == "observation"}

    def _read(self, td: TensorDictBase, leaf: Leaf) -> Array:
        if not leaf.is_text:
            return _array(td.get(leaf.key).reshape(self.num_rows, *leaf.shape))
        value = td.get(leaf.key)
        texts = np.array(value.tolist() if hasattr(value, "tolist") else value, dtype=object).reshape(-1).tolist()
        if wrong := [text for text in texts if not isinstance(text, str)]:
            fix = "drop it with ExcludeTransform, or turn it into a tensor"
            raise ValueError(f"{'.'.join(leaf.key)} is a {type(wrong[0]).__name__}, neither a tensor nor a text; {fix}")
        return self._encoded(texts)

    def close(self) -> None:
        if not self.env.is_closed:
            self.env.close()


def _items(spec: Any) -> dict[Key, Any]:
    return {_tuple(key): leaf for key, leaf in spec.items(True, True)}


def _tuple(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _array(value: Tensor) -> Array:
    """A tensor as an array that shares its memory, if it lies on the CPU; bfloat16 as its bits."""
    value = value.detach().cpu()
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    array: Array = bits.numpy()
    return array
