"""``SyncFitLoop``: roll out, then train, then roll out again.

The baseline in one picture::

   EnvPool (a process per env) ──observation rows──▶ LockstepCollector ──batch of all envs──▶ policy.act
       ▲                                                                                     │
       └──────────────────────────── chunks of actions, executed in lockstep ◀───────────────┘
   LockstepCollector ──global batch [N, T]──▶ SyncFitLoop ──micro-batch──▶ policy.training_step (sum loss, valid count)
       ──▶ SizeWeighted strategy (accumulate; divide once by the valid count) ──▶ optimizer step(s), then version v+1
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.collectors.episodes import rollout_metrics
from vla_async.collectors.lockstep import LockstepCollector
from vla_async.collectors.pool import EnvPool
from vla_async.collectors.pool_recorder import PoolRecorder
from vla_async.data.staleness import StalenessMeter, staleness_of
from vla_async.data.streamer import valid_decisions
from vla_async.data.trajectory_store import Quota, store_of
from vla_async.envs.base import EnvSpec
from vla_async.loops.base import Loop
from vla_async.monitor import metric_table as names
from vla_async.monitor.metrics import Meter
from vla_async.monitor.process_memory import own_mib
from vla_async.monitor.timeline_run import WORKER
from vla_async.monitor.timeline_track import Kind
from vla_async.rng import fold
from vla_async.strategies.size_weighted import SizeWeighted

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

_VALID, SAMPLES = "valid elements", "samples"  # of micro-batches: counted, and not logged themselves


class SyncFitLoop(Loop):
    """Reinforcement learning without overlap: the baseline that everything asynchronous is measured against.

    Consumes: decisions of all envs, collected in lockstep with the newest weights.
    Waits for: the slowest env at every decision, and the whole rollout before it trains.
    Produces: one update per rollout (``update_epochs`` passes over it), so staleness is 0.
    Unblocked by: the env workers, each within ``env_timeout_s``.

    Args:
        decisions_per_env: T, the decisions that each env contributes to an update; the global batch is ``num_envs * T``.
        update_epochs: passes over the global batch.
        mini_batch_size: decisions per optimizer step; the whole global batch by default.
        micro_batch_size: decisions per forward and backward, to fit memory; does not change the result.
        max_grad_norm: gradients are clipped to this norm; null for no clipping.
        env_timeout_s: how long an env may take to be built or to answer.
    """

    stage = "fit"

    def __init__(
        self,
        decisions_per_env: int = 32,
        update_epochs: int = 4,
        mini_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_grad_norm: float | None = 0.5,
        env_timeout_s: float = 300.0,
    ) -> None:
        counts = {"decisions_per_env": decisions_per_env, "update_epochs": update_epochs}
        sizes = {"mini_batch_size": mini_batch_size, "micro_batch_size": micro_batch_size}
        for name, value in (counts | sizes).items():
            if value is not None and value < 1:
                raise ValueError(f"fit_loop.{name}={value} must be at least 1")
        if micro_batch_size is not None and mini_batch_size is not None and micro_batch_size > mini_batch_size:
            raise ValueError(
                f"fit_loop.micro_batch_size={micro_batch_size} is larger than fit_loop.mini_batch_size={mini_batch_size}; "
                "a micro-batch is a part of a mini-batch"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"fit_loop.max_grad_norm={max_grad_norm} must be positive, or null for no clipping")
        if not env_timeout_s > 0:
            raise ValueError(f"fit_loop.env_timeout_s={env_timeout_s} must be positive")
        self.decisions_per_env, self.update_epochs = decisions_per_env, update_epochs
        self.mini_batch_size, self.micro_batch_size = mini_batch_size, micro_batch_size
        self.max_grad_norm, self.env_timeout_s = max_grad_norm, env_timeout_s
        self._pool: EnvPool | None = None
        self._shuffle = torch.Generator()
        self._parts: int | None = None  # mini-batches per epoch, where several ranks must agree on it

    def check(self, trainer: AsyncTrainer) -> None:
        """Refuse what cannot work, before any worker starts."""
        objective = trainer.policy.objective
        if objective is None:
            raise ValueError("model.objective is not set; fit needs one, for example vla_async.objectives.PPO")
        global_batch, made_of = self._global_batch(trainer)
        for name, size in {"mini_batch_size": self.mini_batch_size, "micro_batch_size": self.micro_batch_size}.items():
            if size is not None and size > global_batch:
                raise ValueError(
                    f"fit_loop.{name}={size} is larger than the global batch of {global_batch} decisions ({made_of}); lower "
                    "it or collect more"
                )
        tasks = len(trainer.env.task_names)
        if not trainer.env.is_batched and trainer.env.num_envs < tasks:
            raise ValueError(
                f"env.num_envs={trainer.env.num_envs} envs cannot train on {tasks} tasks, for each env runs one; "
                f"raise it to at least {tasks}, or choose fewer tasks"
            )
        if objective.needs_whole_episodes and type(self) is SyncFitLoop:
            name = type(objective).__name__
            raise ValueError(f"model.objective={name} needs whole episodes, which SyncFitLoop cuts; use StreamingFitLoop")
        if trainer.ranks.several and type(self) is SyncFitLoop:
            raise ValueError(
                f"trainer.num_ranks={trainer.ranks.settings.num_ranks}, but SyncFitLoop trains on one rank; take "
                "StreamingFitLoop with train_async=false, streamer=false, async_interaction=false, the same algorithm"
            )

    def _global_batch(self, trainer: AsyncTrainer) -> tuple[int, str]:
        """The most decisions of an update, and what they come from."""
        envs, each = trainer.env.num_envs, self.decisions_per_env
        return envs * each, f"env.num_envs={envs} times fit_loop.decisions_per_env={each}"

    def open(self, trainer: AsyncTrainer) -> EnvSpec:
        """Start the envs."""
        self.shuffle_by(fold(trainer.seed, "shuffle"))
        self._pool = EnvPool(trainer.env, timeout_s=self.env_timeout_s)
        tracks = [trainer.timeline.track(WORKER, number) for number in range(len(self._pool.pids))]
        self._pool.tracks = [track for track in tracks if track is not None]
        return self._pool.spec

    def shuffle_by(self, seed: int) -> None:
        """Draw the orders of decisions from this seed on."""
        self._shuffle.manual_seed(seed % 2**63)

    def run(self, trainer: AsyncTrainer) -> None:
        """Train until the trainer has had enough."""
        assert self._pool is not None
        autocast = trainer.fabric.autocast
        collector = LockstepCollector(
            self._pool,
            trainer.policy,
            decisions_per_env=self.decisions_per_env,
            seed=trainer.seed,
            autocast=autocast,
            timeline=trainer.timeline,
            recorder=self._recorder(trainer, self._pool),
        )
        if state := trainer.state.loop:
            check_same_loop(state, "collector", self)
            collector.load_state_dict(state["collector"])
            self._shuffle.set_state(state["shuffle"])
        while not trainer.should_stop:
            with trainer.timeline.step(trainer.state.counters.step + 1):
                self._step_in_turn(trainer, collector)

    def _recorder(self, trainer: AsyncTrainer, pool: EnvPool) -> PoolRecorder | None:
        """What saves some of the training episodes, if any are wanted."""
        store = store_of(trainer)
        if store is None or not store.recording.train_every_n_steps:
            return None
        quota, indices = Quota(store.recording, of_training=True), range(trainer.env.num_envs)
        return PoolRecorder(pool, store, quota, factory=trainer.env, indices=indices, split="train")

    def _step_in_turn(self, trainer: AsyncTrainer, collector: LockstepCollector) -> None:
        """One update: a rollout, then the training on it."""
        version, pool = trainer.state.counters.step, collector.pool
        started, busy = time.perf_counter(), pool.busy_s
        trainer.policy.eval()
        with trainer.timeline.span(Kind.ROLLOUT, version):
            batch = collector.collect(policy_version=version)
        collected = time.perf_counter()
        trainer.policy.train()
        meter = self._update(trainer, batch)
        trained = time.perf_counter()
        finished = collector.take_finished()
        env_steps = int(batch.get(keys.EXECUTED).sum())
        metrics = trainer.objective.summarize(meter.means()) | rollout_metrics(finished, trainer.env)
        metrics |= self._ages(batch, version)
        metrics |= self._paces(batch, meter.total(SAMPLES), collected - started, trained - collected, busy)
        with trainer.interrupts.critical():
            trainer.objective.end_update()
            counters = trainer.state.counters
            counters.step, counters.env_steps = counters.step + 1, counters.env_steps + env_steps
            counters.episodes += len(finished)
            trainer.state.loop = {"collector": collector.state_dict(), "shuffle": self._shuffle.get_state()}
        with trainer.timeline.span(Kind.END_OF_STEP):
            trainer.end_step(metrics)

    def _ages(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """That nothing was stale."""
        meter = StalenessMeter(max_staleness=0)
        meter.add(staleness_of(batch, version))
        return meter.metrics() | {names.STALENESS_BOUND: 0.0}

    def _paces(
        self, batch: TensorDictBase, samples: float, rollout_s: float, train_s: float, busy_s: float
    ) -> dict[str, float]:
        """How fast an update was, and what memory it took; ``busy_s`` is what the pool had counted before it."""
        assert self._pool is not None
        executed, took = batch[keys.EXECUTED], rollout_s + train_s
        workers = took * len(self._pool.pids)
        return {
            names.ROLLOUT_S: rollout_s,
            names.TRAIN_S: train_s,
            names.UPDATE_S: took,
            names.WAIT_S: rollout_s,
            names.ENV_STEPS_PER_S: int(executed.sum()) / took,
            names.DECISIONS_PER_S: int(executed.any(-1).sum()) / took,
            names.SAMPLES_PER_S: samples / took,
            names.TRAINER_IDLE: rollout_s / took,
            names.WORKER_IDLE: 1.0 - (self._pool.busy_s - busy_s) / workers,
            names.TRAINER_MIB: own_mib([os.getpid()]),
            names.WORKERS_MIB: own_mib(self._pool.pids),
        }

    def _update(self, trainer: AsyncTrainer, batch: TensorDictBase) -> Meter:
        """One update: ``update_epochs`` passes, unless the objective ends it early."""
        objective = trainer.objective
        with trainer.timeline.span(Kind.PREPARE, len(batch)):
            if objective.needs_proximal != "never":
                with trainer.fabric.autocast():
                    objective.recompute(trainer.policy, batch, self.micro_batch_size)
            objective.prepare(batch)
        meter = Meter()
        self._epochs(trainer, valid_decisions(batch), self.update_epochs, meter)
        return meter

    def _epochs(self, trainer: AsyncTrainer, flat: TensorDictBase | None, epochs: int, meter: Meter) -> None:
        """Passes over decisions ``[B]``, in mini-batches, unless the objective ends the update early.

        One of several ranks may have no decisions (None), and takes part in the optimizer steps all the same.
        """
        for indices in self._mini_batches(0 if flat is None else len(flat), epochs):
            part = Meter()
            if flat is not None and len(indices):
                mini = flat[indices.to(flat.device)]
                for micro in mini.split(self.micro_batch_size or len(mini)):
                    self._backward(trainer, micro, part)
            if self._end_mini_batch(trainer, part, meter):
                break

    def _mini_batches(self, num_decisions: int, epochs: int) -> Iterator[Tensor]:
        """The indices of each mini-batch; every epoch has an order of its own."""
        for _ in range(epochs):
            order = torch.randperm(num_decisions, generator=self._shuffle)
            if self._parts is None:
                yield from order.split(self.mini_batch_size or num_decisions)
            else:
                yield from order.tensor_split(self._parts)

    def _backward(self, trainer: AsyncTrainer, micro: TensorDictBase, part: Meter) -> TensorDictBase:
        """Back-propagate the sum over a micro-batch; returns it with what it must hold when it is trained on again."""
        with trainer.timeline.span(Kind.MICRO_BATCH, len(micro)):
            with trainer.fabric.autocast():
                output = trainer.module.training_step(micro)
            trainer.fabric.backward(output.loss, num_samples=output.num_samples)
        part.add(output.metrics)
        part.add({_VALID: (torch.tensor(float(output.num_samples)), 0.0), SAMPLES: (torch.tensor(float(len(micro))), 0.0)})
        return micro.update(dict(output.kept))

    def _end_mini_batch(self, trainer: AsyncTrainer, part: Meter, meter: Meter) -> bool:
        """One optimizer step, for which the strategy divides once; returns whether the objective ends the update."""
        part = trainer.ranks.merged(part)
        if part.total(_VALID) == 0.0:  # nothing to learn from, for example groups without a difference
            trainer.optimizer.zero_grad()
            cast(SizeWeighted, trainer.fabric.strategy).reset()
            return False
        with trainer.timeline.span(Kind.OPTIMIZER):
            norm = trainer.optimizer_step(self.max_grad_norm)
        meter.merge(part)
        meter.add({names.GRAD_NORM: (torch.tensor(norm), 1.0)})
        return trainer.objective.ends_update(part.means())

    def close(self) -> None:
        """End the envs."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def check_same_loop(state: Mapping[str, Any], part: str, loop: Loop) -> None:
    """Refuse the state of another fit loop, which knows nothing of what this one has to go on with.

    Raises:
        ValueError: if ``part`` is not in the state.
    """
    if part not in state:
        raise ValueError(
            f"the checkpoint is of a run with another fit_loop than {type(loop).__name__}; resume it with that one, or "
            "start a new run from its weights with trainer.init_from"
        )
