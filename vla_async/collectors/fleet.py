"""``Fleet``: the processes of a rollout on one host, and what they share.

::

   EnvWorker ──rows of its slots──▶ Slab ◀──decisions── InferenceReplica ◀──weights── WeightPublisher
       ▲                             │                        ▲                              ▲
       └──── free slots ◀── TrajectoryQueue ◀── finished slots┘      Supervisor: replaces what dies
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import nn
from torchrl.envs.utils import ExplorationType

from vla_async.collectors.acting import VERSION_LEAF
from vla_async.collectors.board import Board
from vla_async.collectors.env_worker import EnvSource, EnvsReady, WorkerOrders, run_env_worker
from vla_async.collectors.pool import WorkerError, how_it_ended, worker_context
from vla_async.collectors.replica import ReplicaOrders, ReplicaReady, ReplicaSettings, run_replica
from vla_async.collectors.slab import TRAJ_IDS, Leaf, Slab, SlabLayout
from vla_async.collectors.supervisor import Member, Supervisor
from vla_async.collectors.tally import Tally
from vla_async.collectors.wires import ALARM, PAUSED, STOPPED, Ask, EnvAddress, Wires, clock
from vla_async.collectors.worker import Reply
from vla_async.data.queue import TrajectoryQueue
from vla_async.rng import fold
from vla_async.weights.publisher import WeightPublisher

T = TypeVar("T")


@dataclass(frozen=True)
class FleetSettings:
    """How a fleet works; see :class:`StreamingCollector` for what each means."""

    policy_devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    assignment: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    max_wait_s: float = 0.0
    async_interaction: bool = True
    seed: int = 0
    exploration_type: ExplorationType = ExplorationType.RANDOM
    autocast: torch.dtype | None = None
    batch_sizes: tuple[int, ...] | None = None
    compile_policy: bool = False
    num_threads: int = 1
    env_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    max_restarts: int = 3
    max_text_bytes: int = 256


@dataclass(frozen=True)
class RowCounts:
    """How far the random streams of each row are: its decisions and the episodes it has started, each of length N."""

    decisions: list[int]
    episodes: list[int]


class Fleet:
    """Env workers, replicas, slab, queue and publisher of one host; all of them end with :meth:`close`.

    Args:
        shards: for each worker, the envs that it steps.
        settings: how it works.
    """

    def __init__(self, shards: Sequence[Sequence[EnvSource]], settings: FleetSettings) -> None:
        self.settings = settings
        self._context = worker_context()
        self._sources = [cloudpickle.dumps(list(shard)) for shard in shards]
        self._workers: list[Member] = []
        self._replicas: list[Member] = []
        self._supervisor: Supervisor | None = None
        self._wires = Wires.open(self._context, len(shards), len(settings.policy_devices))
        # a fleet that nobody closed ends its processes when it is forgotten, or before Python would wait for them at exit
        self._finalizer = Finalize(self, _end, args=(self._workers, self._replicas, 0.5), exitpriority=0)

    # ------------------------------------------------------------------ start

    def open(self) -> EnvsReady:
        """Start all processes and wait until the envs are built; says what they are like, and how many rows there are.

        Raises:
            WorkerError: if an env cannot be built, with the worker's own traceback.
        """
        try:
            for number in range(len(self._sources)):
                self._workers.append(self._start_worker(number))
            for number, device in enumerate(self.settings.policy_devices):
                self._replicas.append(self._start_replica(number, device))
            ready = self._gather(EnvsReady, self._workers)
            for number, answer in enumerate(ready):
                if answer.leaves != ready[0].leaves:
                    raise WorkerError(f"env worker {number} gives {answer.leaves}, but env worker 0 gives {ready[0].leaves}")
        except BaseException:
            self.close(0.0)
            raise
        self._place(ready)
        return EnvsReady([size for answer in ready for size in answer.num_rows], ready[0].leaves, ready[0].env_spec)

    def _place(self, ready: Sequence[EnvsReady]) -> None:
        """Number the rows, and assign the workers to replicas: round-robin, or as the settings say."""
        first, self.envs = 0, list[EnvAddress]()
        for worker, answer in enumerate(ready):
            given = self.settings.assignment
            replica = worker % len(self._replicas) if given is None else given[worker]
            for place, size in enumerate(answer.num_rows):
                self.envs.append(EnvAddress(worker, place, range(first, first + size), replica))
                first += size
        self.num_rows, self._leaves = first, ready[0].leaves

    def serve(
        self,
        policy: Any,
        *,
        decisions: int,
        num_slots: int,
        spans_episodes: bool,
        version: int = 0,
        counts: RowCounts | None = None,
    ) -> None:
        """Give the policy to the replicas, allocate the slab, and let the rollouts begin.

        Args:
            policy: any policy; the replicas get copies.
            decisions: T, the most decisions in a slot.
            num_slots: S, at least the number of rows.
            spans_episodes: see :class:`SlabLayout`.
            version: number of updates behind the policy.
            counts: decisions and episodes of each row so far, to go on from; zero by default.

        Raises:
            ValueError: if the policy and the envs do not go together.
            MemoryError: if the slab does not fit.
            WorkerError: if a replica cannot hold the policy.
        """
        pickled = cloudpickle.dumps(_portable(policy))
        for replica in self._replicas:
            replica.link.send((pickled, self._leaves))
        ready = self._gather(ReplicaReady, self._replicas)
        layout = SlabLayout(self._all_leaves(ready[0]), num_slots, decisions, spans_episodes)
        layout.check_fits("max_in_flight, the number of envs or frames_per_batch")
        self.slab, self.board = Slab(layout), Board(self.num_rows, num_slots, len(self._workers))
        if counts is not None:
            self.board.decisions[:], self.board.episodes[:] = counts.decisions, counts.episodes
        if any(device.type == "cuda" for device in self.settings.policy_devices):
            self.slab.block.pin()
        is_module = isinstance(policy, nn.Module) and any(True for _ in [*policy.parameters(), *policy.buffers()])
        self.publisher = None
        if is_module:
            self.publisher = WeightPublisher(policy, len(self._replicas), version, self._announce, self._await_acks)
        self.tallies = [Tally(self._most_rows(number)) for number in range(len(self._replicas))]
        self._began = clock()
        self._send_orders()
        self._supervisor = self._make_supervisor()
        self.queue = TrajectoryQueue(self.slab, self.board, self._wires.finished, self._wires.free, self._supervisor.check)
        self._supervisor.start()
        if self.publisher is not None:
            self.publisher.confirm()
        self.queue.open()

    def _all_leaves(self, ready: ReplicaReady) -> tuple[Leaf, ...]:
        written = {leaf.key: leaf for leaf in ready.writes}
        own = [VERSION_LEAF, Leaf(TRAJ_IDS, (), torch.int64, "decision")]
        merged = {leaf.key: leaf for leaf in self._leaves} | written
        return (*merged.values(), *own)

    def _most_rows(self, replica: int) -> int:
        rows = sum(len(env.rows) for env in self.envs if env.replica == replica)
        return max(1, min(rows, self.settings.max_batch_size or rows))

    def _send_orders(self) -> None:
        base = torch.tensor([fold(self.settings.seed, "policy", row) for row in range(self.num_rows)])
        shared = None if self.publisher is None else self.publisher.shared
        for number, replica in enumerate(self._replicas):
            envs = [env for env in self.envs if env.replica == number]
            replica.link.send(ReplicaOrders(self.slab, self.board, envs, shared, self.tallies[number], base))
        for number in range(len(self._workers)):
            self._order_worker(number)

    def _order_worker(self, number: int) -> None:
        worker, envs = self._workers[number], [env for env in self.envs if env.worker == number]
        worker.link.send(WorkerOrders(self.slab, self.board, envs, worker.generation, self.settings.seed))

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

    def _start(self, name: str, target: Any, *arguments: Any) -> Member:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), name=name.replace(" ", "-"), daemon=True)
        process.start()
        theirs.close()
        return Member(name, process, ours)

    def _start_worker(self, number: int) -> Member:
        text_bytes = self.settings.max_text_bytes
        return self._start(f"env worker {number}", run_env_worker, number, self._sources[number], text_bytes, self._wires)

    def _start_replica(self, number: int, device: torch.device) -> Member:
        settings = self.settings
        own = ReplicaSettings(
            device=device,
            max_batch_size=settings.max_batch_size or 2**31,
            max_wait_s=settings.max_wait_s,
            lockstep=not settings.async_interaction,
            seed=settings.seed,
            exploration_type=settings.exploration_type,
            autocast=settings.autocast,
            batch_sizes=settings.batch_sizes,
            compile_policy=settings.compile_policy,
            num_threads=settings.num_threads,
        )
        return self._start(f"replica {number}", run_replica, number, own, self._wires)

    def _replace_worker(self, number: int) -> Member:
        """Take the place of a worker that has ended: give its slots back, and start another."""
        generation = self._workers[number].generation + 1
        self.board.claiming[number] = 0
        self.queue.recover(lambda: bool(self.board.claiming.any()))
        for env in self.envs:
            if env.worker == number:
                self._wires.asks[env.replica].send(Ask.FORGET, generation, env.rows.start, clock())
        member = self._start_worker(number)
        member.generation = generation
        return member

    def _gather(self, kind: type[T], members: Sequence[Member]) -> list[T]:
        """One message from each of the members, in their order."""
        waiting: dict[Any, int] = {member.link: number for number, member in enumerate(members)}
        received: dict[int, T] = {}
        deadline = clock() + self.settings.start_timeout_s
        while waiting:
            answered: list[Any] = wait(list(waiting), max(0.0, deadline - clock()))
            if not answered:
                names = ", ".join(members[number].name for number in waiting.values())
                raise WorkerError(f"no answer within start_timeout_s={self.settings.start_timeout_s:g} s from {names}")
            for link in answered:
                number = waiting.pop(link)
                received[number] = _receive(kind, members[number], link)
                members[number].started = None
        return [received[number] for number in range(len(members))]

    # ------------------------------------------------------------------ while it runs

    def _announce(self) -> None:
        for channel in self._wires.asks:
            channel.send(Ask.WEIGHTS, 0, 0, clock())

    def _await_acks(self) -> list[tuple[int, int, int]]:
        wait([self._wires.acks.reader])
        records = self._wires.acks.receive()
        if self._supervisor is not None and any(replica == ALARM for replica, _, _ in records):
            self._supervisor.check()
        return [(replica, version, total) for replica, version, total in records if replica != ALARM]

    def pause(self) -> None:
        """Let all replicas stop answering; returns when they have. Envs finish their step and then wait."""
        if self.publisher is not None:
            self.publisher.confirm()
        for channel in self._wires.asks:
            channel.send(Ask.PAUSE, 0, 0, clock())
        left = set(range(len(self._replicas)))
        while left:
            left -= {replica for replica, _, total in self._await_acks() if total == PAUSED}

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        for channel in self._wires.asks:
            channel.send(Ask.RESUME, 0, 0, clock())

    def interrupt(self) -> None:
        """Wake whoever waits for the queue."""
        self._wires.finished.send(ALARM)

    def _alarm(self) -> None:
        self._wires.finished.send(ALARM)
        self._wires.acks.send(ALARM, 0, 0)

    @property
    def counts(self) -> RowCounts:
        """How far the random streams of each row are."""
        return RowCounts(self.board.decisions.tolist(), self.board.episodes.tolist())

    @property
    def restarts(self) -> int:
        """How many workers have been replaced."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def uptime_s(self) -> float:
        """Seconds since the rollouts began."""
        return clock() - self._began

    def close(self, grace_s: float = 0.7) -> None:
        """End all processes: ask, then after ``grace_s`` seconds kill. Harmless if called again."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None
        if self._workers or self._replicas:
            for channel in self._wires.answers:
                channel.send(STOPPED, 0, 0)
            for channel in self._wires.asks:
                channel.send(Ask.STOP, 0, 0, clock())
            _end(self._workers, self._replicas, grace_s)
            self._wires.close()
        self._finalizer.cancel()


def _portable(policy: Any) -> Any:
    """A policy as it can be sent to another process: on the CPU, without what belongs to a trainer."""
    if not isinstance(policy, nn.Module):
        return policy
    on_gpu = any(tensor.is_cuda for tensor in [*policy.parameters(), *policy.buffers()])
    portable = copy.deepcopy(policy).cpu() if on_gpu else copy.copy(policy)
    if "_fabric" in portable.__dict__:
        portable.__dict__ = {**portable.__dict__, "_fabric": None}
    return portable


def _receive(kind: type[T], member: Member, link: Connection) -> T:
    try:
        message = link.recv()
    except (EOFError, ConnectionResetError):
        how = how_it_ended(member.process, starting=True)
        raise WorkerError(f"{member.name} (pid {member.process.pid}) {how}") from None
    if isinstance(message, Reply):
        raise WorkerError(f"{member.name} failed with\n{message.error}")
    assert isinstance(message, kind)
    return message


def _end(workers: list[Member], replicas: list[Member], grace_s: float) -> None:
    deadline = clock() + grace_s
    for members in (workers, replicas):
        while members:
            member = members.pop()
            member.process.join(max(0.0, deadline - clock()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.process.close()
            member.link.close()
