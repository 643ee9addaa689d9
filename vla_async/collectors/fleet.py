"""``Fleet``: the processes of a rollout on one host, and what they share.

::

   EnvWorker ──rows of its slots──▶ Slab ◀──decisions── InferenceReplica ◀──weights── WeightPublisher
       ▲                             │                        ▲                              ▲
       └──── free slots ◀── TrajectoryQueue ◀── finished slots┘      Supervisor: replaces what dies
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import torch
from torch import nn

from vla_async.collectors.acting import RandomActions, all_leaves, portable
from vla_async.collectors.board import Board
from vla_async.collectors.env_worker import EnvSource, run_env_worker
from vla_async.collectors.groups import Grouping
from vla_async.collectors.orders import EnvsReady, FleetSettings, ReplicaOrders, ReplicaReady, RowCounts, WorkerOrders
from vla_async.collectors.pool import WorkerError, worker_context
from vla_async.collectors.processes import Member, end_members, gather, start_member
from vla_async.collectors.replica_control import ReplicaControl
from vla_async.collectors.replica_process import run_replica
from vla_async.collectors.shards import place_envs
from vla_async.collectors.slab import Slab, SlabLayout, human_bytes
from vla_async.collectors.supervisor import Supervisor
from vla_async.collectors.tally import Tally, summary
from vla_async.collectors.wires import ADMITTED, ALARM, STOPPED, Ask, Wires, clock
from vla_async.data.groups import GroupLedger
from vla_async.data.in_flight import restore_bundles
from vla_async.data.queue import TrajectoryQueue
from vla_async.monitor import metric_table as names
from vla_async.monitor.timeline_run import PUBLISHER, REPLICA, WORKER, Timeline
from vla_async.rng import fold
from vla_async.weights.publisher import WeightPublisher


class Fleet:
    """Env workers, replicas, slab, queue and publisher of one host; all of them end with :meth:`close`.

    Args:
        shards: for each worker, the envs that it steps.
        settings: how it works.
        timeline: in which the processes record what they do; by default nothing is recorded.
    """

    def __init__(
        self, shards: Sequence[Sequence[EnvSource]], settings: FleetSettings, timeline: Timeline | None = None
    ) -> None:
        self.settings, self._timeline = settings, timeline or Timeline()
        self._context = worker_context()
        self._sources = [cloudpickle.dumps(list(shard)) for shard in shards]
        self._workers: list[Member] = []
        self._replicas: list[Member] = []
        self._supervisor: Supervisor | None = None
        self._wires = Wires.open(self._context, len(shards), len(settings.policy_devices))
        self._control = ReplicaControl(self._wires)
        # a fleet that nobody closed ends its processes when it is forgotten, or before Python would wait for them at exit
        self._finalizer = Finalize(self, end_members, args=(self._workers, self._replicas, 0.5), exitpriority=0)

    # ------------------------------------------------------------------ start

    def open(self) -> EnvsReady:
        """Start all processes and wait until the envs are built; says what they are like, and how many rows there are.

        Raises:
            WorkerError: if an env cannot be built, with the worker's own traceback.
        """
        try:
            for number in range(len(self._sources)):
                self._workers.append(self._start_worker(number))
            for number, device in enumerate(self.settings.devices):
                self._replicas.append(self._start_replica(number, device))
            ready = gather(EnvsReady, self._workers, self.settings.start_timeout_s)
            for number, answer in enumerate(ready):
                if answer.leaves != ready[0].leaves:
                    raise WorkerError(f"env worker {number} gives {answer.leaves}, but env worker 0 gives {ready[0].leaves}")
        except BaseException:
            self.close(0.0)
            raise
        sizes = [answer.num_rows for answer in ready]
        self.envs = place_envs(sizes, len(self._replicas), self.settings.assignment)
        self.num_rows, self._leaves, self._action_specs = sum(map(sum, sizes)), ready[0].leaves, ready[0].action_specs
        return dataclasses.replace(ready[0], num_rows=[size for worker in sizes for size in worker])

    def serve(
        self,
        policy: Any,
        *,
        decisions: int,
        num_slots: int,
        grouping: Grouping | None = None,
        version: int = 0,
        weights: Any = None,
        counts: RowCounts | None = None,
        waiting: dict[str, Any] | None = None,
        sized_by: str = "max_in_flight, the number of envs or frames_per_batch",
    ) -> None:
        """Give the policy to the replicas, allocate the slab, and let the rollouts begin.

        Args:
            policy: any policy; the replicas get copies. None acts at random.
            decisions: T, the most decisions in a slot.
            num_slots: S, at least the number of rows.
            grouping: that the envs were made with: each slot then holds one episode, and they are handed out by groups.
                None lets slots hold fragments, each for itself.
            version: number of updates behind the policy's weights, or behind ``weights``.
            weights: those that the rollouts begin with, if not the policy's own; see :meth:`WeightPublisher.publish`.
            counts: decisions and episodes of each row so far, to go on from; zero by default.
            waiting: finished slots of an earlier run, from :func:`vla_async.data.in_flight.save_bundles`.
            sized_by: the settings that say how many slots there are and how long they are.

        Raises:
            ValueError: if the policy and the envs do not go together.
            MemoryError: if the slab does not fit.
            WorkerError: if a replica cannot hold the policy.
        """
        layout = self._layout(policy, decisions, num_slots, spans_episodes=grouping is None)
        layout.check_fits(sized_by)
        self._allocate(layout, grouping, counts)
        self.publisher = self._make_publisher(policy, version if weights is None else version - 1)
        self.tallies = [Tally(self._most_rows(number)) for number in range(len(self._replicas))]
        self._began = clock()
        self._send_orders()
        self._supervisor = self._make_supervisor()
        self._control.check = self._supervisor.check
        self.queue = self._make_queue(grouping, self._supervisor)
        self._supervisor.start()
        if self.publisher is not None:
            self.publisher.confirm()
            if weights is not None:
                self.publisher.publish(version, weights)  # before a slot is free: nothing is decided without them
        room = num_slots if grouping is None else num_slots // grouping.size
        self.queue.open(() if waiting is None else restore_bundles(self.slab, waiting, version, room))

    def _layout(self, policy: Any, decisions: int, num_slots: int, *, spans_episodes: bool) -> SlabLayout:
        """Give the policy to the replicas; what they write decides what a slot holds."""
        pickled = cloudpickle.dumps(portable(RandomActions(self._action_specs) if policy is None else policy))
        for replica in self._replicas:
            replica.link.send((pickled, self._leaves))
        ready = gather(ReplicaReady, self._replicas, self.settings.start_timeout_s)
        return SlabLayout(all_leaves(self._leaves, ready[0].writes), num_slots, decisions, spans_episodes)

    def _allocate(self, layout: SlabLayout, grouping: Grouping | None, counts: RowCounts | None) -> None:
        print(f"slab: {human_bytes(layout.nbytes)} of shared memory, {layout}", flush=True)
        self.slab, self.board = Slab(layout), Board(self.num_rows, layout.num_slots, len(self._workers))
        if counts is not None:
            self.board.decisions[:] = counts.decisions
            self.board.episodes[:] = counts.episodes if grouping is None else grouping.aligned(counts.episodes)
        if grouping is not None:
            self.board.admitted[:] = self.board.episodes
        if any(device.type == "cuda" for device in self.settings.devices):
            self.slab.block.pin()

    def _make_publisher(self, policy: Any, version: int) -> WeightPublisher | None:
        """None for a policy that has no weights."""
        if not isinstance(policy, nn.Module) or not any(True for _ in [*policy.parameters(), *policy.buffers()]):
            return None
        announce, acks, track = self._control.announce, self._control.acks, self._timeline.track(PUBLISHER)
        return WeightPublisher(policy, len(self._replicas), version, announce, acks, track)

    def _make_queue(self, grouping: Grouping | None, supervisor: Supervisor) -> TrajectoryQueue:
        groups = None if grouping is None else GroupLedger(grouping, self.slab, self.board, self._wake)
        finished, free = self._wires.finished, self._wires.free
        return TrajectoryQueue(self.slab, self.board, finished, free, supervisor.check, groups)

    def _most_rows(self, replica: int) -> int:
        rows = sum(len(env.rows) for env in self.envs if env.replica == replica)
        return max(1, min(rows, self.settings.max_batch_size or rows))

    def _send_orders(self) -> None:
        timeline = self._timeline
        self._tracks = [timeline.track(WORKER, number) for number in range(len(self._workers))]
        base = torch.tensor([fold(self.settings.seed, "policy", row) for row in range(self.num_rows)])
        shared = self.publisher.shared if self.publisher else None
        for number, replica in enumerate(self._replicas):
            envs = [env for env in self.envs if env.replica == number]
            track, trace = timeline.track(REPLICA, number), timeline.torch_trace(f"{REPLICA} {number}")
            replica.link.send(ReplicaOrders(self.slab, self.board, envs, shared, self.tallies[number], base, track, trace))
        for number in range(len(self._workers)):
            self._order_worker(number)

    def _order_worker(self, number: int) -> None:
        worker, lockstep = self._workers[number], not self.settings.async_interaction
        envs = [env for env in self.envs if env.worker == number]
        seed, track = self.settings.seed, self._tracks[number]
        worker.link.send(WorkerOrders(self.slab, self.board, envs, worker.generation, seed, lockstep, track))

    def _make_supervisor(self) -> Supervisor:
        settings = self.settings
        return Supervisor(
            self._workers,
            self._replicas,
            self.board,
            env_timeout_s=settings.env_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            max_restarts=settings.max_restarts,
            restart=self._replace_worker,
            welcome=self._order_worker,
            alarm=self._alarm,
        )

    # ------------------------------------------------------------------ processes

    def _start_worker(self, number: int) -> Member:
        arguments = (number, self._sources[number], self.settings.max_text_bytes, self._wires)
        return start_member(self._context, f"env worker {number}", run_env_worker, *arguments)

    def _start_replica(self, number: int, device: torch.device) -> Member:
        own = self.settings.of_replica(device)
        return start_member(self._context, f"replica {number}", run_replica, number, own, self._wires)

    def _replace_worker(self, number: int) -> Member:
        """Take the place of a worker that has ended: give its slots back, and start another."""
        generation = self._workers[number].generation + 1
        self.board.claiming[number] = 0
        # one that has ended at the same time would be waited for in vain
        self.queue.recover(lambda: any(self.board.claiming[n] and w.process.is_alive() for n, w in enumerate(self._workers)))
        for env in self.envs:
            if env.worker == number:
                self._wires.asks[env.replica].send(Ask.FORGET, generation, env.rows.start, clock())
        member = self._start_worker(number)
        member.generation = generation
        return member

    # ------------------------------------------------------------------ while it runs

    def _wake(self, rows: Sequence[int]) -> None:
        """Tell the workers of some rows that these may begin an episode."""
        for worker in {env.worker for env in self.envs for row in rows if row in env.rows}:
            self._wires.answers[worker].send(ADMITTED, 0, 0)

    def pause(self) -> None:
        """Let all replicas stop answering; returns when they have. Envs finish their step and then wait."""
        if self.publisher is not None:
            self.publisher.confirm()
        self._control.pause()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._control.resume()

    def interrupt(self) -> None:
        """Wake whoever waits for the queue."""
        self._wires.finished.send(ALARM)

    def _alarm(self) -> None:
        self._wires.finished.send(ALARM)
        self._wires.acks.send(ALARM, 0, 0)

    def stats(self) -> dict[str, Any]:
        """What the processes have done since they started, by names of :mod:`vla_async.monitor.metric_table`."""
        return {
            names.UPTIME_S: (uptime := clock() - self._began),
            **summary(self.tallies),
            **self.queue.metrics(),
            names.SLAB_BYTES: self.slab.layout.nbytes,
            names.ENV_STEPS: int(self.board.env_steps.sum()),
            names.WORKER_ENV_STEPS: self.board.env_steps.tolist(),
            names.WORKER_BUSY_S: self.board.busy.tolist(),
            names.WORKER_IDLE: 1.0 - float(self.board.busy_s(clock()).mean()) / uptime,
            names.WORKER_NO_SLOT_S: self.board.waiting.tolist(),
            names.RESTARTS: self.restarts,
        }

    @property
    def pids(self) -> tuple[list[int], list[int]]:
        """The processes of the env workers, and those of the replicas."""
        return [member.process.pid or 0 for member in self._workers], [member.process.pid or 0 for member in self._replicas]

    @property
    def counts(self) -> RowCounts:
        """How far the random streams of each row are."""
        return RowCounts(self.board.decisions.tolist(), self.board.episodes.tolist())

    @property
    def restarts(self) -> int:
        """How many workers have been replaced."""
        supervisor = self._supervisor  # which another thread may end meanwhile
        return 0 if supervisor is None else supervisor.restarts

    def close(self, grace_s: float = 0.7) -> None:
        """End all processes: ask, then after ``grace_s`` seconds kill. Harmless if called again."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor, self._control.check = None, lambda: None
        if self._workers or self._replicas:
            for channel in self._wires.answers:
                channel.send(STOPPED, 0, 0)
            self._control.stop()
            end_members(self._workers, self._replicas, grace_s)
            self._wires.close()
        self._finalizer.cancel()
