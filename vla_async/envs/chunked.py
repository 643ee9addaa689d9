"""``ChunkedEnv``: any :class:`Simulator` as a TorchRL ``EnvBase`` in which one step executes a chunk of H actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from vla_async import keys
from vla_async.envs.base import ChunkStep, EnvSpec, OnSuccess, SimStep, Simulator
from vla_async.rng import episode_seed


@dataclass
class _Now:
    """Where the rows' episodes are. Apart from the env, because a module's attributes are slow to set.

    Attributes:
        elapsed: int64 ``[N]``, env steps of the episode.
        success: bool ``[N]``, after the last env step.
        success_once: bool ``[N]``, at any env step of the episode.
        oldest: no episode has more env steps; a plain number, so that most env steps need not look at the rows.
        observation: by name, each ``[N, ...]``, what the next decision sees.
    """

    elapsed: Tensor
    success: Tensor
    success_once: Tensor
    oldest: int = 0
    observation: dict[str, Tensor] = field(default_factory=dict)


def check_actions(chunk: Tensor) -> None:
    """Refuse actions ``[N, H, A]`` that are not finite.

    Raises:
        ValueError: names the first one.
    """
    if not math.isfinite(chunk.sum().item()) and not torch.isfinite(chunk).all():  # the sum alone can overflow
        where = torch.nonzero(~torch.isfinite(chunk))[0].tolist()
        raise ValueError(f"action {chunk[tuple(where)].item()} at [row, step, element] {where} is not finite")


class ChunkedEnv(EnvBase):
    """Runs chunks of actions on a simulator, and keeps what happened at each env step.

    The action is ``("vla_action", "chunk")`` ``[H, A]``. ``reward`` is the sum over the executed env steps;
    ``step_rewards`` ``[H]`` and ``executed`` ``[H]`` keep them apart. An episode that ends inside a chunk executes
    nothing after its end, and its final observation, reward and success are those of its last executed env step.

    ``reset_rows`` and ``step_chunk`` are the raw way in, without TensorDicts; ``reset`` and ``step`` are TorchRL's.

    Args:
        simulator: what is stepped; owned and closed by this env.
        chunk_size: H.
        max_episode_steps: the horizon in env steps.
        on_success: see :class:`vla_async.envs.EnvFactory`.
        is_batched: give the env a batch size of ``[simulator.num_rows]`` instead of ``[]``.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        chunk_size: int = 1,
        max_episode_steps: int = 50,
        on_success: OnSuccess = "terminate",
        is_batched: bool = False,
    ) -> None:
        if not is_batched and simulator.num_rows != 1:
            raise ValueError(f"a simulator of {simulator.num_rows} rows needs is_batched=True")
        rows, on = simulator.num_rows, simulator.device
        super().__init__(batch_size=torch.Size([rows] if is_batched else []), device=None if on.type == "cpu" else on)
        self.is_closed = False  # TorchRL takes an env for closed until it is told
        self.simulator, self.num_rows, self.chunk_size = simulator, rows, chunk_size
        self.max_episode_steps, self.on_success = max_episode_steps, on_success
        self.recording = False
        self._seed, self._episodes = 0, 0
        success, success_once = (torch.zeros(rows, dtype=torch.bool, device=on) for _ in range(2))
        self._now = _Now(torch.zeros(rows, dtype=torch.int64, device=on), success, success_once)
        self._action_low = torch.tensor(simulator.action_low, device=on)
        self._action_high = torch.tensor(simulator.action_high, device=on)
        # The specs need one observation; the episode it starts is never seen, for each reset carries its own seed.
        every_row = torch.ones(rows, dtype=torch.bool, device=on)
        first = simulator.reset(every_row, torch.zeros(rows, dtype=torch.int64, device=on))
        self._now.observation = {name: value.clone() for name, value in first.items()}
        self._make_specs(first)

    @property
    def env_spec(self) -> EnvSpec:
        """What a policy has to know of this env."""
        images = {
            name: tuple(value.shape[1:]) for name, value in self._now.observation.items() if value.dtype == torch.uint8
        }
        state = self._now.observation.get("state")
        return EnvSpec(
            action_low=self.simulator.action_low,
            action_high=self.simulator.action_high,
            chunk_size=self.chunk_size,
            state_dim=None if state is None else state.shape[-1],
            images=cast(dict[str, tuple[int, int, int]], images),
        )

    @property
    def observed(self) -> dict[str, Tensor]:
        """What the next decision sees, by name, each ``[N, ...]``."""
        return self._now.observation

    def reset_rows(self, rows: Tensor, seeds: Tensor) -> dict[str, Tensor]:
        """Start an episode in ``rows`` (bool ``[N]``) from ``seeds`` (int64 ``[N]``); returns all rows' observation."""
        observation = self.simulator.reset(rows, seeds)
        self._now.elapsed.masked_fill_(rows, 0)
        self._now.oldest = int(self._now.elapsed.max())
        self._now.success, self._now.success_once = self._now.success & ~rows, self._now.success_once & ~rows
        self._keep(observation, rows)
        return self._now.observation

    def step_chunk(self, chunk: Tensor, rows: Tensor | None = None) -> ChunkStep:
        """Execute one decision.

        Args:
            chunk: float32 ``[N, H, A]``; elements outside the action bounds are clipped to them.
            rows: bool ``[N]``, the rows that take part; all by default.

        Raises:
            ValueError: if an action is not finite; names the first one.
        """
        check_actions(chunk)
        active = torch.ones_like(self._now.success) if rows is None else rows.clone()
        rewards: list[Tensor] = []
        executed: list[Tensor] = []
        frames: list[Tensor] = []
        terminated = truncated = torch.zeros_like(active)
        chunk = torch.clamp(chunk, self._action_low, self._action_high)
        goes_on = rows is None or bool(rows.any())
        while goes_on and len(executed) < self.chunk_size:
            stepped = active
            everyone = self.num_rows == 1 or (rows is None and not executed)
            result = self.simulator.step(chunk[:, len(executed)], stepped)
            rewards.append(result.reward.clone() if everyone else torch.where(stepped, result.reward, 0.0))
            executed.append(stepped)
            self._count(result, stepped, everyone)
            ended = self._ended(result, stepped)
            if ended is not None:
                terminated, truncated = terminated | ended[0], truncated | ended[1]
                active = stepped & ~(terminated | truncated)
                goes_on = bool(active.any())
            # Only what the next decision or the end of the episode will see is read: a picture may be costly
            if len(executed) == self.chunk_size or not goes_on:
                self._keep(result.observation, None if everyone else stepped)
            elif ended is not None and bool((stepped & ~active).any()):
                self._keep(result.observation, stepped & ~active)
            if self.recording and bool(stepped[0]):
                frames.append(self.simulator.render())
        step_rewards, steps = self._side_by_side(rewards, torch.float32), self._side_by_side(executed, torch.bool)
        if self.on_success == "finish_chunk":
            won = steps.any(-1) & self._now.success_once
            terminated, truncated = terminated | won, truncated & ~won
        flags = self._now.success, self._now.success_once, terminated, truncated
        return ChunkStep(self._now.observation, step_rewards, steps, *flags, frames)

    def _side_by_side(self, columns: list[Tensor], dtype: torch.dtype) -> Tensor:
        """What the executed env steps gave, ``[N]`` each, as ``[N, H]`` with zeros behind."""
        if self.chunk_size == len(columns) == 1:
            return columns[0].unsqueeze(-1)
        if len(columns) == self.chunk_size:
            return torch.stack(columns, dim=-1)
        missing = torch.zeros(self.num_rows, dtype=dtype, device=self._now.success.device)
        return torch.stack(columns + [missing] * (self.chunk_size - len(columns)), dim=-1)

    def _count(self, result: SimStep, rows: Tensor, everyone: bool) -> None:
        """Take over what one env step did to the rows' episodes. The flags are new tensors: the old ones are given away."""
        self._now.elapsed += rows
        self._now.oldest += 1
        if everyone:
            self._now.success = result.success.clone()
            self._now.success_once = self._now.success_once | result.success
            return
        self._now.success = torch.where(rows, result.success, self._now.success)
        self._now.success_once = self._now.success_once | (rows & result.success)

    def _ended(self, result: SimStep, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The rows whose episode an env step terminates and truncates; None where it can have ended none."""
        over = result.success if self.on_success == "terminate" else torch.zeros_like(rows)
        if result.failure is not None:
            over = over | result.failure
        if self._now.oldest < self.max_episode_steps and not bool(over.any()):
            return None
        terminated = rows & over
        return terminated, rows & ~terminated & (self._now.elapsed >= self.max_episode_steps)

    def _keep(self, observation: Mapping[str, Tensor], rows: Tensor | None) -> None:
        """Take over the rows' part of an observation (all by default); the other rows keep the one they ended on."""
        if rows is None or bool(rows.all()):
            self._now.observation = {name: value.clone() for name, value in observation.items()}
            return
        self._now.observation = {
            name: torch.where(rows.reshape(-1, *[1] * (value.ndim - 1)), value, self._now.observation[name])
            for name, value in observation.items()
        }

    # ---------------------------------------------------------------- TorchRL's EnvBase

    def _make_specs(self, observation: dict[str, Tensor]) -> None:
        batch, chunk = self.batch_size, self.chunk_size
        on = self.device
        leaves = {
            name: Unbounded((*batch, *value.shape[1:]), dtype=value.dtype, device=on) for name, value in observation.items()
        }

        def flags(*shape: int) -> Binary:
            return Binary(shape=(*batch, *shape), dtype=torch.bool, device=on)

        self.observation_spec = Composite(
            observation=Composite(leaves, shape=batch),
            language_instruction=NonTensor(shape=batch, example_data=self.simulator.instructions[0]),
            success=flags(1),
            success_once=flags(1),
            executed=flags(chunk),
            step_rewards=Unbounded((*batch, chunk), device=on),
            shape=batch,
        )
        low, high = self._action_low, self._action_high
        shape = (*batch, chunk, low.numel())
        action = Bounded(low.expand(shape).clone(), high.expand(shape).clone(), shape=shape, device=on)
        self.action_spec = Composite(vla_action=Composite(chunk=action, shape=batch), shape=batch)
        self.reward_spec = Unbounded((*batch, 1), device=on)
        self.done_spec = Composite(done=flags(1), terminated=flags(1), truncated=flags(1), shape=batch)

    def _surface(self, value: Tensor) -> Tensor:
        """Rows as TorchRL sees them: ``[N, ...]`` if batched, else without the row dimension."""
        value = value.clone()
        return value if self.batch_size else value[0]

    def _observation_td(self, observation: dict[str, Tensor]) -> dict[str, Any]:
        texts = list(self.simulator.instructions)
        leaves = {name: self._surface(value) for name, value in observation.items()}
        return {
            keys.OBSERVATION: TensorDict(leaves, batch_size=self.batch_size, device=self.device),
            keys.INSTRUCTION: NonTensorStack(*texts) if self.batch_size else texts[0],
            "success": self._surface(self._now.success.unsqueeze(-1)),
            "success_once": self._surface(self._now.success_once.unsqueeze(-1)),
        }

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = torch.ones_like(self._now.success)
        if tensordict is not None and "_reset" in tensordict.keys():
            rows = tensordict.get("_reset").reshape(self.num_rows)
        seeds = [episode_seed(self._seed, row, self._episodes) for row in range(self.num_rows)]
        self._episodes += 1
        out = self._observation_td(self.reset_rows(rows, torch.tensor(seeds, device=rows.device)))
        return self.full_observation_spec.zero().update(self.full_done_spec.zero()).update(out)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        chunk = tensordict.get(keys.CHUNK).reshape(self.num_rows, self.chunk_size, -1)
        rows = tensordict.get("_step", None)
        result = self.step_chunk(chunk, None if rows is None else rows.reshape(self.num_rows))
        out = self._observation_td(result.observation)
        out["executed"], out["step_rewards"] = self._surface(result.executed), self._surface(result.step_rewards)
        out["reward"] = self._surface(result.step_rewards.sum(-1, keepdim=True))
        for key in ("done", "terminated", "truncated"):
            out[key] = self._surface(getattr(result, key).unsqueeze(-1))
        return TensorDict(out, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        """The next reset starts episode 0 of this seed's stream, whatever ran before."""
        if seed is not None:
            self._seed, self._episodes = int(seed), 0

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the simulator."""
        if not self.is_closed:
            self.simulator.close()
        super().close(raise_if_closed=raise_if_closed)
