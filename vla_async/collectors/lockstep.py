"""``LockstepCollector``: all envs decide together and wait for the slowest. The synchronous baseline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.collectors.pool import EnvPool
from vla_async.policies.base import VLAPolicy
from vla_async.rng import episode_seed, fold


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


def check_finite(chunk: Tensor, pool: EnvPool) -> None:
    """Refuse actions that are not finite, naming what the policy had been given.

    Raises:
        FloatingPointError: names the env and its instruction.
    """
    bad = (~torch.isfinite(chunk)).flatten(1).any(-1)
    if bool(bad.any()):
        row = int(torch.nonzero(bad)[0])
        seen = {name: bool(torch.isfinite(leaf[row].float()).all()) for name, leaf in pool.rows.observation.items()}
        raise FloatingPointError(
            f"the policy's action for env {row} ({pool.tasks[row]!r}, instruction {pool.instructions[row]!r}) is not finite; "
            f"its observation was finite: {seen}"
        )


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


class LockstepCollector:
    """Rolls out a policy in all envs of a pool, a fixed number of decisions per env at a time.

    Episodes run on from one call to the next. Every random number belongs to an env: the seed of its next episode and
    the key of its next decision are functions of (seed, env, count) alone.

    Args:
        pool: the envs; owned by the caller.
        policy: decides for all rows at once, on its own device.
        decisions_per_env: T, the length of the rollout.
        seed: root of all random streams.
        autocast: makes the context in which the policy acts (``fabric.autocast``).
    """

    def __init__(
        self,
        pool: EnvPool,
        policy: VLAPolicy,
        *,
        decisions_per_env: int,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.pool, self.policy, self.decisions_per_env, self.autocast = pool, policy, decisions_per_env, autocast
        self.tracker = EpisodeTracker(pool)
        self.finished: list[Episode] = []
        self._num, self._seed = pool.num_envs, seed
        self._request_base = torch.tensor([fold(seed, "policy", row) for row in range(self._num)])
        self._decisions = 0
        self._episodes = torch.zeros(self._num, dtype=torch.int64)
        self._seeds = torch.zeros(self._num, dtype=torch.int64)
        self._history: list[list[Tensor]] = [[] for _ in range(self._num)]
        self._tokens: dict[str, Tensor] = {}
        self._started = False

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def _next_seeds(self) -> Tensor:
        counts = self._episodes.tolist()
        return torch.tensor([episode_seed(self._seed, row, count) for row, count in enumerate(counts)])

    def _start(self) -> None:
        everyone = torch.ones(self._num, dtype=torch.bool)
        self._seeds = self._next_seeds()
        self._episodes += 1
        self.pool.reset(everyone, self._seeds)
        self._started = True

    def _see(self, observation: dict[str, Tensor]) -> TensorDict:
        """What the policy reads, on its device: a copy, since the rows are written to again."""
        for text in set(self.pool.instructions) - self._tokens.keys():
            self._tokens[text] = self.policy.tokenize(text)
        tokens = torch.stack([self._tokens[text] for text in self.pool.instructions])
        leaves = {name: leaf.clone() for name, leaf in observation.items()}
        source = {
            keys.OBSERVATION: TensorDict(leaves, batch_size=[self._num]),
            keys.INSTRUCTION_TOKENS: tokens,
            keys.REQUEST_KEY: (self._request_base + self._decisions).unsqueeze(-1),
        }
        return TensorDict(source, batch_size=[self._num]).to(self.device, non_blocking=True)

    @torch.no_grad()
    def collect(self, policy_version: int) -> TensorDictBase:
        """Roll out T decisions in each env.

        Args:
            policy_version: number of updates behind the policy's weights; stamped on every decision.

        Returns:
            TensorDict ``[N, T]`` on the policy's device with what :mod:`vla_async.keys` lists; ``("next",
            "state_value")`` is filled everywhere: at a truncation from the final observation, and at the fragment end
            from the observation that the next rollout starts from.
        """
        if not self._started:
            self._start()
        with set_exploration_type(ExplorationType.RANDOM), self.autocast():
            steps = [self._decide(policy_version) for _ in range(self.decisions_per_env)]
            batch: TensorDictBase = torch.stack(steps, dim=1)
            if keys.VALUE in batch.keys():
                self._bootstrap(batch)
        return batch

    def _decide(self, policy_version: int) -> TensorDict:
        td = self.policy.act(self._see(self.pool.rows.observation))
        td.set(keys.POLICY_VERSION, torch.full((self._num, 1), policy_version, device=td.device))
        chunk = td.get(keys.CHUNK).float().cpu()
        check_finite(chunk, self.pool)
        self._decisions += 1
        tasks, seeds, following = list(self.pool.tasks), self._seeds, self._next_seeds()
        self.pool.step(chunk, next_seeds=following)
        ended = self.tracker.after_step(tasks, seeds)
        rows, done = self.pool.rows, self.pool.rows.terminated | self.pool.rows.truncated
        for row in range(self._num):
            self._history[row] = [] if row in ended else [*self._history[row], chunk[row].clone()]
        self.finished += ended.values()
        self._seeds = torch.where(done, following, seeds)
        self._episodes += done
        td.set("next", self._outcome(done).to(td.device, non_blocking=True))
        cut = rows.truncated & ~rows.terminated
        if keys.VALUE in td.keys() and bool(cut.any()):
            final = self.policy.act(self._see(rows.final_observation)).get(keys.VALUE)
            td.set(keys.NEXT_VALUE, torch.where(cut.unsqueeze(-1).to(td.device), final, 0.0))
        elif keys.VALUE in td.keys():
            td.set(keys.NEXT_VALUE, torch.zeros_like(td.get(keys.VALUE)))
        return td

    def _outcome(self, done: Tensor) -> TensorDict:
        rows = self.pool.rows
        outcome = {
            "reward": rows.step_rewards.sum(-1, keepdim=True),
            "step_rewards": rows.step_rewards.clone(),
            "executed": rows.executed.clone(),
            "done": done.unsqueeze(-1),
        }
        for name in ("terminated", "truncated", "success", "success_once"):
            outcome[name] = getattr(rows, name).unsqueeze(-1).clone()
        return TensorDict(outcome, batch_size=[self._num])

    def _bootstrap(self, batch: TensorDictBase) -> None:
        """Complete V of the next state where the episode went on: it is the next decision's own value."""
        last = self.policy.act(self._see(self.pool.rows.observation)).get(keys.VALUE)
        following = torch.cat([batch.get(keys.VALUE)[:, 1:], last.unsqueeze(1)], dim=1)
        batch.set(keys.NEXT_VALUE, torch.where(batch.get(keys.DONE), batch.get(keys.NEXT_VALUE), following))

    def take_finished(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what leads to the running episodes: their seeds and the chunks executed so far."""
        history = [torch.stack(chunks) if chunks else torch.zeros(0) for chunks in self._history]
        return {"decisions": self._decisions, "episodes": self._episodes.clone(), "seeds": self._seeds.clone(), "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the envs back where they were, by replaying the running episodes from their seeds.

        Raises:
            ValueError: if the state is of another number of envs.
        """
        if len(state["history"]) != self._num:
            raise ValueError(
                f"the checkpoint holds {len(state['history'])} running episodes, but env.num_envs={self._num}; "
                "resume with the same number of envs, or start from the weights alone with trainer.init_from"
            )
        self._decisions, self._episodes = state["decisions"], state["episodes"].clone()
        self._seeds, self._started = state["seeds"].clone(), True
        self._history = [list(chunks) for chunks in state["history"]]
        everyone = torch.ones(self._num, dtype=torch.bool)
        self.pool.reset(everyone, self._seeds)
        self.tracker.clear(everyone)
        for decision in range(max(map(len, self._history), default=0)):
            self._replay(decision)

    def _replay(self, decision: int) -> None:
        behind = torch.tensor([len(chunks) > decision for chunks in self._history])
        chunk = torch.zeros_like(self.pool.rows.chunk)
        for row in torch.nonzero(behind).flatten().tolist():
            chunk[row] = self._history[row][decision]
        self.pool.step(chunk, active=behind)
        if ended := self.tracker.after_step(self.pool.tasks, self._seeds):
            raise RuntimeError(f"env {min(ended)} ended its episode while it was replayed: the simulator is not deterministic")
