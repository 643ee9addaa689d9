"""``AsyncTrainer``: reinforcement-learning post-training on Lightning Fabric.

 ACTING (rollout devices, one process per env shard, one replica per device)
   EnvWorker ──obs row in its slot──▶ DynamicBatcher ──batch ≤ Bmax, oldest waits ≤ Tmax──▶ InferenceReplica
       ▲                                                                                     │ policy.act
       └────────────action, log-prob, value, policy_version written into the same slot ◀──────┘
   EnvWorker closes the trajectory ──slot id──▶ TrajectoryQueue (bounded; paced by free slots)

 LEARNING (trainer devices, one Fabric rank per device)
   TrajectoryQueue ──▶ Streamer ──micro-batch──▶ policy.training_step (sum loss, valid count)
       ──▶ SizeWeighted strategy (accumulate; divide once by the global valid count) ──▶ optimizer step(s), then version v+1
   WeightPublisher ──weights v+1──▶ every InferenceReplica (swapped between two batches, never inside one)
``loops/streaming.py`` runs all of this; ``loops/sync.py`` the synchronous baseline: the same roles, taking turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import lightning
from lightning.fabric.loggers import Logger
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer

from vla_async.callbacks import Callback, Progress
from vla_async.callbacks.defaults import with_defaults
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.fabric import Accelerator, Precision, make_fabric, resolve_accelerator
from vla_async.interrupts import Interrupts
from vla_async.limits import check_limits, check_pair, check_run
from vla_async.loops.base import Loop
from vla_async.loops.collect import CollectLoop, CollectReport
from vla_async.loops.evaluate import EvaluateLoop, EvaluationResult
from vla_async.loops.sft import SFTLoop
from vla_async.loops.sync import SyncFitLoop
from vla_async.loops.validation import Validation, evaluate_in_turn, make_validation
from vla_async.memory import report_memory
from vla_async.monitor import metric_table as names
from vla_async.monitor.process_memory import device_memory
from vla_async.monitor.timeline_run import Timeline
from vla_async.objectives.base import Objective
from vla_async.policies.base import VLAPolicy
from vla_async.ranks import Ranks, RankSettings, StrategyName, refuse_other_ranks
from vla_async.rng import Split
from vla_async.run_directory import RunDirectory
from vla_async.setting_up import set_up_policy
from vla_async.state import Counters, TrainState, find_checkpoint, load_weights
from vla_async.strategies.ranks import DEFAULT_TIMEOUT_S
from vla_async.strategies.size_weighted import SizeWeighted
from vla_async.winding_up import winding_up


class AsyncTrainer:
    """Runs a policy through its loops: collect demonstrations, imitate them, improve by RL, evaluate.

    Each call of ``fit``, ``sft``, ``validate``, ``test`` or ``collect`` makes a run directory ``<root_dir>/<name>/<time>/``.

    Args:
        fit_loop: how reinforcement learning runs.
        sft_loop: how behaviour cloning runs.
        evaluate_loop: how episodes are evaluated, for ``validate``, ``test`` and during training.
        collect_loop: how demonstrations are collected.
        max_steps: ``fit`` ends after this many steps, that is updates; -1 for no limit. (``sft`` has its own.)
        max_env_steps: ``fit`` ends with the update that reaches this many env steps; null for no limit.
        val_every_n_steps: ``fit`` validates before its first step and after every n steps; 0 for never.
        seed: root of all random streams of a run.
        name: name of the run, the directory below ``root_dir``.
        root_dir: directory of all runs.
        init_from: checkpoint whose weights the policy starts from (a path, or ``last`` or ``best`` of this name).
        accelerator: Fabric's accelerator: ``auto``, ``cpu``, ``cuda``.
        device: index of the device, if the accelerator has several.
        strategy: ``auto`` for one device; ``size_weighted_ddp`` (each rank has the whole model) or ``size_weighted_fsdp``
            (sharded by FSDP2) for several ranks.
        num_ranks: ranks that ``fit`` and ``sft`` train on, all of this host: on CUDA the devices from ``device`` on, on a
            CPU they share it. Rank 0 starts the others by running its command again, unless a launcher such as torchrun
            has. So a script does with ``if __name__ == "__main__":`` nothing before its ``fit`` or ``sft`` but build what
            that takes; what stands after it, rank 0 does alone.
        rank_timeout_s: how long a rank waits for another, or for rank 0's rollouts and validations.
        precision: Fabric's precision.
        num_threads: torch's threads on a CPU; by default the cores that the envs leave, at least one.
        check_memory: before a run, let the policy train on one decision, print what memory the run is estimated to take, and
            refuse it if that is more than is free.
        timeline: let ``fit`` write ``timeline.json``, which shows in Perfetto or chrome://tracing who does what, when: of
            all steps if true, or of those in ``[first, last]``, the first of all being 1. See docs/profiling.md.
        callbacks: in addition to Checkpoint, Progress, SuccessPlot and TrajectoryRecorder, which are always there; an
            instance given here takes the place of the default one.
        loggers: in addition to metrics.csv, which is always written.
    """

    def __init__(
        self,
        fit_loop: Loop | None = None,
        sft_loop: SFTLoop | None = None,
        evaluate_loop: EvaluateLoop | None = None,
        collect_loop: CollectLoop | None = None,
        max_steps: int = -1,
        max_env_steps: int | None = None,
        val_every_n_steps: int = 0,
        seed: int = 0,
        name: str = "vla_async",
        root_dir: Path = Path("runs"),
        init_from: str | None = None,
        accelerator: Accelerator = "auto",
        device: int = 0,
        strategy: StrategyName = "auto",
        num_ranks: int = 1,
        rank_timeout_s: float = DEFAULT_TIMEOUT_S,
        precision: Precision = "32-true",
        num_threads: int | None = None,
        check_memory: bool = True,
        timeline: bool | list[int] = False,
        callbacks: list[Callback] | None = None,
        loggers: list[Logger] | None = None,
    ) -> None:
        check_limits(seed=seed, max_steps=max_steps, max_env_steps=max_env_steps, num_threads=num_threads)
        check_limits(val_every_n_steps=val_every_n_steps)
        check_run(name, fit_loop)
        self.fit_loop, self.sft_loop = fit_loop or SyncFitLoop(), sft_loop or SFTLoop()
        self.evaluate_loop, self.collect_loop = evaluate_loop or EvaluateLoop(), collect_loop or CollectLoop()
        self.max_steps, self.max_env_steps, self.val_every_n_steps = max_steps, max_env_steps, val_every_n_steps
        self.seed, self.name, self.root_dir, self.init_from = seed, name, Path(root_dir), init_from
        self.accelerator, self.device, self.precision = resolve_accelerator(accelerator), device, precision
        self.ranks = Ranks(RankSettings(strategy, num_ranks, rank_timeout_s, self.accelerator, device))
        self.num_threads, self.check_memory = num_threads, check_memory
        self.callbacks, self.loggers = with_defaults(callbacks or []), loggers or []
        self.validation, self.timeline = make_validation(self.evaluate_loop), Timeline(timeline, max_steps=max_steps)
        self.config_text: str | None = None
        self.interrupts, self._clock = Interrupts(), 0.0  # up to when training time has been counted
        self.origin: Path | None = None  # the checkpoint that a run started from

    # ------------------------------------------------------------------ what users call

    def fit(self, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None = None) -> None:
        """Improve a policy by reinforcement learning.

        Args:
            policy: the policy, with its objective.
            env: its envs.
            ckpt_path: checkpoint to resume: a path, or ``last`` or ``best`` of this run's name.
        """
        self._train(self.fit_loop, policy, env, ckpt_path)

    def sft(self, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None = None) -> None:
        """Fine-tune a policy on demonstrations; arguments as in :meth:`fit`."""
        self._train(self.sft_loop, policy, env, ckpt_path)

    def validate(self, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None = None) -> EvaluationResult:
        """Evaluate on the validation seeds, with the weights of ``ckpt_path`` (or of ``init_from``)."""
        return self._evaluate("validate", policy, env, ckpt_path)

    def test(self, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None = None) -> EvaluationResult:
        """Evaluate on the test seeds, with the weights of ``ckpt_path`` (or of ``init_from``)."""
        return self._evaluate("test", policy, env, ckpt_path)

    def collect(self, policy: VLAPolicy | None, env: EnvFactory) -> CollectReport:
        """Collect demonstrations with the scripted controller of ``collect_loop``; the policy is not used."""
        env.check()
        self.collect_loop.check()
        self._open_run()
        with self.interrupts, self._progress.collecting(self.collect_loop.num_episodes) as tell:
            return self.collect_loop.run(env, seed=self.seed, progress=tell)

    # ------------------------------------------------------------------ what loops call

    @property
    def should_stop(self) -> bool:
        """Whether the budget of ``fit`` is spent, or a callback has set ``state.stopped``."""
        counters = self.state.counters
        out_of_env_steps = self.max_env_steps is not None and counters.env_steps >= self.max_env_steps
        return self.state.stopped or out_of_env_steps or (self.max_steps != -1 and counters.step >= self.max_steps)

    @property
    def objective(self) -> Objective:
        """The policy's objective, which the fit loop has made sure of."""
        assert self.policy.objective is not None
        return self.policy.objective

    def optimizer_step(self, max_grad_norm: float | None) -> float:
        """Clip, step and clear the gradients; an interrupt waits until all of it is done. Returns their norm before that."""
        with self.interrupts.critical():
            if max_grad_norm is not None:
                self.fabric.clip_gradients(self.module, self.optimizer, max_norm=max_grad_norm, error_if_nonfinite=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.state.scheduler is not None:
                self.state.scheduler.step()
            self.state.counters.optimizer_steps += 1
        return cast(SizeWeighted, self.fabric.strategy).grad_norm

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Close a step that the loop has counted: validate if due, log, tell the callbacks."""
        now, counters = time.perf_counter(), self.state.counters
        counters.elapsed_s, self._clock = counters.elapsed_s + now - self._clock, now
        rate: dict[str, float] = {names.LR: self.optimizer.param_groups[0]["lr"]}
        merged = self.log({**metrics, **self.validation.metrics(self), **rate, **device_memory(self.fabric.device)})
        with self.interrupts.critical():
            self.state.end_step()
        self.validation.step_ended(self)
        for callback in self.callbacks:
            callback.on_step_end(self, merged)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What is done inside the block is no training time."""
        started = time.perf_counter()
        yield
        self._clock += time.perf_counter() - started

    def log(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write metrics to all loggers, under the current step and with the other x axes; returns all of it."""
        merged = {**metrics, **self.state.counters.axes}
        self.fabric.log_dict(merged, step=self.state.counters.step)
        return merged

    def save_checkpoint(self, name: str, finished_step: bool = False) -> Path:
        """Write ``checkpoints/<name>.ckpt`` of this run: the state as it is, or as it was when the last step ended."""
        path = self.run.checkpoints / f"{name}.ckpt"
        with self.interrupts.critical():
            self.state.save(self.fabric, path, finished_step)
        return path

    # ------------------------------------------------------------------ how a run is carried out

    @property
    def _progress(self) -> Progress:
        return next(callback for callback in self.callbacks if isinstance(callback, Progress))

    def _open_run(self, ranks: Ranks | None = None) -> None:
        directory = None
        if ranks is None or ranks.is_first:
            refuse_other_ranks(self.ranks)
            self.run = RunDirectory.create(self.root_dir, self.name)
            directory = self.run.path
        else:  # it trains, and that is all
            self.callbacks, self.loggers, self.val_every_n_steps, self.validation = [], [], 0, Validation()
        self.fabric = make_fabric(self.accelerator, self.device, self.precision, directory, self.loggers, ranks)
        if directory is not None:
            self.run.describe(self.config_text)
        lightning.seed_everything(self.seed, verbose=False)

    def _train(self, loop: Loop, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None) -> None:
        self.policy, self.env = policy, env
        resumed = find_checkpoint(ckpt_path, self.root_dir, self.name, stage=loop.stage)
        start = resumed or find_checkpoint(self.init_from, self.root_dir, self.name, prefer="sft")
        self.origin = start[1] if start else None
        check_pair(policy, env)
        loop.check(self)
        for callback in self.callbacks:
            callback.check(self)
        with self.interrupts:
            self._open_run(self.ranks)
        with winding_up(self, loop):
            if loop.stage == "fit":
                self.timeline.open(self.run.path if self.ranks.is_first else None)
            self._set_up(loop.stage, loop.open(self))
            if self.check_memory and self.ranks.is_first:
                report_memory(self, loop)
            if resumed:
                self.state.restore(*resumed)
            elif start:
                load_weights(policy, *start)
            del resumed, start  # they may be large
            self.ranks.begin_run(self.seed, self.state)
            self._clock = time.perf_counter()
            self.state.end_step()
            for callback in self.callbacks:
                callback.on_start(self)
            self.validation.begin(self)
            loop.run(self)
            self.validation.finish(self)
        self.ranks.leave()

    def _evaluate(self, split: Split, policy: VLAPolicy, env: EnvFactory, ckpt_path: str | None) -> EvaluationResult:
        self.policy, self.env = policy, env
        weights = find_checkpoint(ckpt_path or self.init_from, self.root_dir, self.name)
        check_pair(policy, env)
        self._open_run()
        with winding_up(self):
            self._set_up(split, self.evaluate_loop.open(env).spec)
            if weights:
                load_weights(policy, *weights)
                self.state.counters = Counters(**weights[0]["counters"])
            del weights
            with self._progress.evaluating(self, split):
                result = evaluate_in_turn(self, split)
            self.log(result.metrics())
        return result

    def _set_up(self, stage: str, spec: EnvSpec) -> None:
        """Build the policy and its optimizer, on the device."""
        optimizer, scheduler = set_up_policy(self.policy, spec, self.fabric.device)
        self.module: _FabricModule
        self.optimizer: _FabricOptimizer
        self.module, self.optimizer = self.fabric.setup(self.policy, optimizer)
        self.module.mark_forward_method("imitation_step")
        self.state = TrainState(stage, self.policy, optimizer, scheduler, seed=self.seed)
