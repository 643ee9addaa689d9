"""``StreamingFitLoop``: rollouts go on while the trainer trains, and training starts on the first full micro-batch.

The picture is that of ``vla_async/trainer.py``. One update::

   TrajectoryQueue ──slot──▶ arrivals: read, stamp staleness, prepare (advantages)
       ──▶ Streamer ──micro-batch──▶ forward, backward (sum)   as trajectories come; kept for the epochs that follow
       ──▶ optimizer step(s) ──▶ WeightPublisher, version v+1 ──▶ the update's slots are free

A slot holds a fragment of one env's decisions or, for an objective that needs whole episodes, one episode. For GRPO the k-th
episodes of a group's envs start in the same state, and are handed on together. An update without a valid element, for all
groups were equal, makes no optimizer step but counts: the weights are published again, so a version is a number of updates.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase

from vla_async.collectors.episodes import rollout_metrics
from vla_async.collectors.fleet import Fleet
from vla_async.collectors.orders import FleetSettings
from vla_async.collectors.shards import check_counts, make_shards
from vla_async.data.in_flight import InFlight
from vla_async.data.queue import Straggler
from vla_async.data.selection import Selection
from vla_async.data.streamer import Streamer, valid_decisions
from vla_async.envs.base import EnvSpec
from vla_async.fabric import autocast_dtype
from vla_async.limits import check_bound, check_choice
from vla_async.loops.dealt import DealtRollouts
from vla_async.loops.following import ReceivedRollouts, follow
from vla_async.loops.rollouts import Rollouts, completed
from vla_async.loops.slots import SlotPlan
from vla_async.loops.sync import SAMPLES, SyncFitLoop, check_same_loop
from vla_async.monitor.metrics import Meter
from vla_async.monitor.timeline_track import Kind
from vla_async.placement import Placement
from vla_async.rng import fold

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class StreamingFitLoop(SyncFitLoop):
    """Reinforcement learning in which rollouts, inference and training overlap, each as a setting.

    Consumes: slots of the TrajectoryQueue, each a fragment of one env's decisions or an episode, at most η updates old.
    Waits for: the next finished slot or group; for one in progress only where the bound on staleness asks for it.
    Produces: one update per ``fragments_per_update`` slots, then weights of the next version, then free slots.
    Unblocked by: the replicas, which hand finished slots over, and the supervisor, whose alarm ends every wait.

    Args:
        decisions_per_env: T, the decisions of a fragment; of no effect where slots hold whole episodes.
        update_epochs: passes over the global batch. The first takes what arrives in its order, if ``streamer``.
        mini_batch_size: decisions per optimizer step, of all ranks together; the whole global batch by default. Several
            ranks then begin to train when the global batch is complete: each cuts its part into equally many.
        micro_batch_size: decisions per forward and backward; by default a fragment or group at a time, if ``streamer``.
        max_grad_norm: gradients are clipped to this norm; null for no clipping.
        env_timeout_s: an env that takes longer for a step or a reset is replaced.
        fragments_per_update: fragments, or episodes, per global batch; one per env by default. For GRPO a multiple of the
            group size.
        train_async: let the envs go on while the trainer trains. Off: they wait for each update, so staleness is 0.
        streamer: train on what has arrived while the rest of the global batch is still being rolled out.
        async_interaction: let each env ask for its action on its own. Off: the envs of a replica decide in lockstep.
        max_staleness: η: no decision is consumed more than η updates after it was made. η + 1 global batches are in flight.
        straggler: what becomes of a fragment in progress that would get too old: ``wait``, ``cut`` or ``drop``. A whole
            episode cannot be cut; of one that is dropped, the group goes on without it.
        selection: which of the trajectories that wait are preferred, see :data:`vla_async.data.selection.Selection`.
        in_flight: what becomes of trajectories that are finished and not consumed when a checkpoint is written. ``drop``: a
            resumed run has lost and counts them. ``save``: it consumes them first, within the bound. Those in progress are
            lost in either case, and their episodes are not played again.
        placement: which device plays which role.
        max_batch_size: Bmax, the most rows of a forward pass of a replica.
        max_wait_s: Tmax, how long the oldest request waits for others.
        envs_per_worker: how many envs share a process.
        num_stages: into how many groups a batched env is cut.
        max_restarts: how often each worker is replaced before its failure ends the run.
        compile_policy: compile what the replicas decide with, by ``torch.compile``; the first batch then takes longer.
    """

    def __init__(
        self,
        decisions_per_env: int = 32,
        update_epochs: int = 4,
        mini_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_grad_norm: float | None = 0.5,
        env_timeout_s: float = 300.0,
        fragments_per_update: int | None = None,
        train_async: bool = True,
        streamer: bool = True,
        async_interaction: bool = True,
        max_staleness: int = 1,
        straggler: Straggler = "wait",
        selection: Selection = "oldest",
        in_flight: InFlight = "drop",
        placement: Placement | None = None,
        max_batch_size: int | None = None,
        max_wait_s: float = 0.0,
        envs_per_worker: int = 1,
        num_stages: int = 1,
        max_restarts: int = 3,
        compile_policy: bool = False,
    ) -> None:
        super().__init__(decisions_per_env, update_epochs, mini_batch_size, micro_batch_size, max_grad_norm, env_timeout_s)
        check_bound(fragments_per_update, train_async, max_staleness)
        for name, value, known in (
            ("straggler", straggler, Straggler),
            ("selection", selection, Selection),
            ("in_flight", in_flight, InFlight),
        ):
            check_choice(f"fit_loop.{name}", value, known)
        self.fragments_per_update, self.train_async, self.streamer = fragments_per_update, train_async, streamer
        self.async_interaction, self.straggler, self.placement = async_interaction, straggler, placement or Placement()
        self.max_staleness, self.selection = max_staleness if train_async else 0, selection
        self.in_flight, self.envs_per_worker, self.num_stages = in_flight, envs_per_worker, num_stages
        batching = {"max_batch_size": max_batch_size, "max_wait_s": max_wait_s, "async_interaction": async_interaction}
        others = {"max_restarts": max_restarts, "env_timeout_s": env_timeout_s, "compile_policy": compile_policy}
        self._settings: dict[str, Any] = batching | others
        try:
            check_counts(envs_per_worker=envs_per_worker, num_stages=num_stages)
            FleetSettings(**self._settings)
        except ValueError as error:
            raise ValueError(f"fit_loop.{error}") from None
        self._fleet: Fleet | None = None
        self._rollouts: Rollouts | None = None

    def check(self, trainer: AsyncTrainer) -> None:
        """Refuse what cannot work, before any worker starts."""
        super().check(trainer)
        if self.plan(trainer).grouping is not None and self.straggler == "cut":
            raise ValueError(
                f"fit_loop.straggler='cut' would cut episodes that {type(trainer.policy.objective).__name__} needs whole; "
                "choose wait or drop"
            )
        if trainer.env.is_batched and self.envs_per_worker > 1:
            raise ValueError(f"fit_loop.envs_per_worker={self.envs_per_worker}: a batched env is one process; set it to 1")
        self.plan(trainer).check_room(self.max_staleness)
        self.plan(trainer).check_devices(len(self.placement.rollout_devices or []))

    def plan(self, trainer: AsyncTrainer) -> SlotPlan:
        """How the decisions of an update are cut into slots."""
        assert trainer.policy.objective is not None  # SyncFitLoop has made sure of it
        return SlotPlan.make(
            trainer.env,
            trainer.policy.objective,
            decisions_per_env=self.decisions_per_env,
            fragments_per_update=self.fragments_per_update,
            envs_per_worker=self.envs_per_worker,
            num_stages=self.num_stages,
            num_replicas=len(self.placement.replicas(trainer.ranks.settings.devices)),
            lockstep=not self.async_interaction,
        )

    def _global_batch(self, trainer: AsyncTrainer) -> tuple[int, str]:
        plan = self.plan(trainer)
        return plan.slots * plan.decisions, f"{plan.slots} trajectories of at most {plan.decisions}"

    def open(self, trainer: AsyncTrainer) -> EnvSpec:
        """Start the envs, on rank 0, which tells the others what they are like."""
        if trainer.ranks.link is not None:
            return cast(EnvSpec, trainer.ranks.link.receive("spec")[1])
        self._final: dict[str, Any] = {}  # what a checkpoint still wants of rollouts that have been closed
        self.shuffle_by(fold(trainer.seed, "shuffle"))
        own = self._settings | {"policy_devices": self.placement.replicas(trainer.ranks.settings.devices)}
        settings = FleetSettings(seed=trainer.seed, autocast=autocast_dtype(trainer.precision), **own)
        grouping = self.plan(trainer).grouping
        shards, _ = make_shards(trainer.env, self.envs_per_worker, self.num_stages, grouping)
        self._fleet = Fleet(shards, settings, trainer.timeline)
        ready = self._fleet.open()
        assert ready.env_spec is not None
        trainer.ranks.tell("spec", ready.env_spec)
        return ready.env_spec

    def run(self, trainer: AsyncTrainer) -> None:
        """Train until the trainer has had enough, which is for rank 0 to say."""
        if trainer.ranks.several:
            trainer.objective.begin_run(trainer.policy)
        if not trainer.ranks.is_first:
            follow(self, trainer)
            return
        assert self._fleet is not None
        if state := trainer.state.loop:
            check_same_loop(state, "rollouts", self)
            self._shuffle.set_state(state["shuffle"])
        kind = DealtRollouts if trainer.ranks.several else Rollouts
        settings = (self.straggler, self.selection, self.max_staleness, self.in_flight, state.get("rollouts"))
        self._rollouts = rollouts = kind(self._fleet, self.plan(trainer), trainer, *settings)
        trainer.state.complete = self._completed
        try:
            while not trainer.should_stop:
                with trainer.timeline.step(trainer.state.counters.step + 1):
                    self._step_update(trainer, rollouts)
            trainer.ranks.tell("stop")
        finally:
            print(rollouts.report())

    def _step_update(self, trainer: AsyncTrainer, rollouts: Rollouts) -> None:
        """One update, from its first trajectory to free slots."""
        rollouts.begin(trainer.state.counters.step)
        meter = self.train_on(trainer, rollouts)
        metrics = trainer.objective.summarize(meter.means()) | rollout_metrics(rollouts.episodes, trainer.env)
        with trainer.interrupts.critical():
            trainer.objective.end_update()
            counters = trainer.state.counters
            counters.step, counters.env_steps = counters.step + 1, counters.env_steps + rollouts.env_steps
            counters.episodes += len(rollouts.episodes)
        rollouts.publish(trainer.state.counters.step)
        trainer.state.loop = {"rollouts": rollouts.state_dict(), "shuffle": self._shuffle.get_state()}
        with trainer.timeline.span(Kind.END_OF_STEP):
            trainer.end_step(metrics | rollouts.metrics(meter.total(SAMPLES)))

    def train_on(self, trainer: AsyncTrainer, rollouts: Rollouts | ReceivedRollouts) -> Meter:
        """All passes over this rank's part of the global batch."""
        trainer.policy.train()
        meter = Meter()
        if self._streams(trainer):
            self._stream(trainer, rollouts, meter)
        else:
            trajectories = rollouts.collect()
            flat = None if trajectories is None else valid_decisions(self._prepared(trainer, trajectories))
            if trainer.ranks.several:
                self._parts = max(1, -(-rollouts.decisions // (self.mini_batch_size or rollouts.decisions or 1)))
            self._epochs(trainer, flat, self.update_epochs, meter)
        trainer.ranks.share_sums(trainer.objective)
        trainer.state.gather()
        return meter

    def _streams(self, trainer: AsyncTrainer) -> bool:
        """Whether the first epoch trains on what has arrived.

        Not where the proximal policy's log-prob of what arrives later is needed, which the first of several optimizer steps
        would make unknowable; nor where several ranks must agree on how many steps there will be.
        """
        if trainer.ranks.several and self.mini_batch_size is not None:
            return False
        return self.streamer and (self.mini_batch_size is None or trainer.objective.needs_proximal == "never")

    def _prepared(self, trainer: AsyncTrainer, trajectories: TensorDictBase) -> TensorDictBase:
        """Trajectories ``[N, T]`` with advantages."""
        needs = trainer.objective.needs_proximal
        with trainer.timeline.span(Kind.PREPARE, len(trajectories)):
            if needs == "prepare" or (needs == "later_steps" and not self._streams(trainer)):
                with trainer.fabric.autocast():
                    trainer.objective.recompute(trainer.policy, trajectories, self.micro_batch_size)
            return trainer.objective.prepare(trajectories)

    def _stream(self, trainer: AsyncTrainer, rollouts: Rollouts | ReceivedRollouts, meter: Meter) -> None:
        """The first epoch on what arrives, the others on what it kept."""
        kept: list[TensorDictBase] = []
        part, over, prepared = Meter(), False, partial(self._prepared, trainer)
        streamer = Streamer(lambda: map(prepared, rollouts.arrivals()), self.micro_batch_size, self.mini_batch_size)
        for micro in streamer:
            if over:
                continue  # the objective has had enough of this update; what still belongs to it is taken off the queue
            kept.append(self._backward(trainer, micro.data, part))
            if micro.ends_mini_batch:
                over = self._end_mini_batch(trainer, part, meter)
                part = Meter()
        if (part.sums or trainer.ranks.several) and not over:
            over = self._end_mini_batch(trainer, part, meter)
        rollouts.trained()
        if self.update_epochs > 1 and not over:
            self._parts = 1 if trainer.ranks.several else None
            self._epochs(trainer, torch.cat(kept) if kept else None, self.update_epochs - 1, meter)

    def lower_staleness(self, max_staleness: int) -> None:
        """Lower η while it runs, from the next update on; see :meth:`Rollouts.lower_staleness`.

        Raises:
            ValueError: if it cannot be lowered to that.
            RuntimeError: if nothing runs.
        """
        if self._rollouts is None:
            raise RuntimeError("max_staleness can be lowered here only while fit runs; set it in the recipe")
        self._rollouts.lower_staleness(max_staleness)

    def live(self, trainer: AsyncTrainer) -> dict[str, float]:
        return {} if (rollouts := self._rollouts) is None else rollouts.live(trainer.state.counters)

    def _completed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The loop's state after a step, with what is known only when a checkpoint is written."""
        if "rollouts" not in state:
            return state  # not a step has been made
        now = self._final if self._rollouts is None else self._rollouts.snapshot()
        return state | {"rollouts": completed(state["rollouts"], now)}

    def close(self) -> None:
        """End the envs and the replicas. What a checkpoint may still want of them is kept until the next run."""
        if self._rollouts is not None:
            self._final = self._rollouts.snapshot()
            self._rollouts.close()
        self._rollouts = None
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None
