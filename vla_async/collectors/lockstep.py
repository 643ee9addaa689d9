"""``LockstepCollector``: all envs decide together and wait for the slowest. The synchronous baseline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.collectors.episodes import Episode, EpisodeTracker
from vla_async.collectors.pool import EnvPool
from vla_async.collectors.view import PolicyView
from vla_async.monitor.timeline_run import Timeline
from vla_async.monitor.timeline_track import Kind
from vla_async.policies.base import VLAPolicy
from vla_async.rng import episode_seed, fold

if TYPE_CHECKING:
    from vla_async.collectors.pool_recorder import PoolRecorder


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
        timeline: records when it decides, and when it waits for the envs; by default nothing does.
        recorder: saves some of the episodes; by default nothing does.
    """

    def __init__(
        self,
        pool: EnvPool,
        policy: VLAPolicy,
        *,
        decisions_per_env: int,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        timeline: Timeline | None = None,
        recorder: PoolRecorder | None = None,
    ) -> None:
        self.pool, self.policy, self.decisions_per_env, self.autocast = pool, policy, decisions_per_env, autocast
        self.tracker, self.view = EpisodeTracker(pool), PolicyView(pool, policy)
        self.finished: list[Episode] = []
        self.timeline, self.recorder = timeline or Timeline(), recorder
        self._num, self._seed = pool.num_envs, seed
        self._request_base = torch.tensor([fold(seed, "policy", row) for row in range(self._num)])
        self._decisions = 0
        self._episodes = torch.zeros(self._num, dtype=torch.int64)
        self._seeds = torch.zeros(self._num, dtype=torch.int64)
        self._history: list[list[Tensor]] = [[] for _ in range(self._num)]
        self._started = False

    def _next_seeds(self) -> Tensor:
        counts = self._episodes.tolist()
        return torch.tensor([episode_seed(self._seed, row, count) for row, count in enumerate(counts)])

    def _start(self) -> None:
        everyone = torch.ones(self._num, dtype=torch.bool)
        self._seeds = self._next_seeds()
        self._episodes += 1
        self.pool.reset(everyone, self._seeds)
        self._started = True
        if self.recorder is not None:
            self.recorder.begins(range(self._num))

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
        if self.recorder is not None:
            self.recorder.quota.begin(policy_version)
        if not self._started:
            self._start()
        with set_exploration_type(ExplorationType.RANDOM), self.autocast():
            steps = [self._decide(policy_version) for _ in range(self.decisions_per_env)]
            batch: TensorDictBase = torch.stack(steps, dim=1)
            if keys.VALUE in batch.keys():
                self._bootstrap(batch)
        return batch

    def _decide(self, policy_version: int) -> TensorDict:
        # a reset inside the step puts the next episode's instruction and task into the pool
        instructions, tasks = list(self.pool.instructions), list(self.pool.tasks)
        request_keys = self._request_base + self._decisions
        with self.timeline.span(Kind.DECIDE, self._num):
            td = self.policy.act(self.view.see(self.pool.rows.observation, instructions, request_keys))
            td.set(keys.POLICY_VERSION, torch.full((self._num, 1), policy_version, device=td.device))
            chunk = self.view.chunk(td)
        seeds, following = self._seeds, self._next_seeds()
        if self.recorder is not None:
            self.recorder.decided(td, chunk, policy_version)
        with self.timeline.span(Kind.ENVS, self._num):
            self.pool.step(chunk, next_seeds=following)
        self._decisions += 1
        ended = self.tracker.after_step(tasks, seeds)
        if self.recorder is not None:
            self.recorder.goes_on(ended, step=policy_version)
        rows, done = self.pool.rows, self.pool.rows.terminated | self.pool.rows.truncated
        for row in range(self._num):
            self._history[row] = [] if row in ended else [*self._history[row], chunk[row].clone()]
        self.finished += ended.values()
        self._seeds = torch.where(done, following, seeds)
        self._episodes += done
        td.set("next", self._outcome(done).to(td.device, non_blocking=True))
        cut = rows.truncated & ~rows.terminated
        if keys.VALUE in td.keys() and bool(cut.any()):
            seen = self.view.see(rows.final_observation, instructions, request_keys)
            final = self.policy.act(seen).get(keys.VALUE)
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
        seen = self.view.see(self.pool.rows.observation, self.pool.instructions, self._request_base + self._decisions)
        last = self.policy.act(seen).get(keys.VALUE)
        following = torch.cat([batch.get(keys.VALUE)[:, 1:], last.unsqueeze(1)], dim=1)
        batch.set(keys.NEXT_VALUE, torch.where(batch.get(keys.DONE), batch.get(keys.NEXT_VALUE), following))

    def take_finished(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what leads to the running episodes: their seeds and the chunks executed so far."""
        history = [torch.stack(chunks) if chunks else torch.zeros(0) for chunks in self._history]
        counts = {"decisions": self._decisions, "episodes": self._episodes.clone(), "seeds": self._seeds.clone()}
        return counts | {"history": history}

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
            raise RuntimeError(
                f"env {min(ended)} ended its episode while it was replayed: its settings have changed since the checkpoint "
                "was written, or its simulator is not deterministic; start from the weights alone with trainer.init_from"
            )
