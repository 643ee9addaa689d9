"""``StreamingCollector``: a TorchRL collector whose envs never wait for each other."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from vla_async.collectors.env_worker import EnvSource
from vla_async.collectors.fleet import Fleet, FleetSettings, RowCounts
from vla_async.collectors.slab import MASK
from vla_async.collectors.tally import summary
from vla_async.envs.base import EnvFactory
from vla_async.policies.base import VLAPolicy

EnvSources = EnvFactory | Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]]


class StreamingCollector(BaseCollector):
    """Rolls out a policy in envs that each ask for their next action on their own, in dynamic batches.

    It yields batches ``[B, T]`` in TorchRL's layout: row ``b`` is a fragment of T decisions of one env, with ``"next"``,
    ``("collector", "traj_ids")`` and, on every decision, the ``"policy_version"`` that made it. Which envs a batch is from
    depends on their speed: a fast one has more rows than a slow one. Processes start with the first use and end with
    :meth:`shutdown`.

    Args:
        create_env_fn: the envs: an :class:`EnvFactory` (the short way into the slab), a callable that returns any
            ``EnvBase``, or a list of such callables, one per env.
        policy: a :class:`VLAPolicy` or any TensorDict module; what it writes is kept. None acts at random.
        frames_per_batch: decisions per batch; rounded up to whole fragments.
        total_frames: iteration ends when so many were yielded; -1 for never.
        max_in_flight: M, batches that are under way at once, the one that the consumer works on included. An env that
            would begin another waits. So no decision is older than M - 1 batches when it is yielded (if the weights are
            updated once per batch). 1 lets the envs wait for each update.
        fragment_length: T; by default ``frames_per_batch`` over the number of envs.
        policy_devices: one replica of the policy on each.
        assignment: for each worker, the replica that answers it; round-robin by default.
        max_batch_size: Bmax, the most rows in a forward pass; by default all that a replica has.
        max_wait_s: Tmax, how long the oldest request waits for others to join its batch.
        async_interaction: False is the lockstep baseline: the envs of a replica decide together.
        envs_per_worker: how many of the envs share a process.
        num_stages: into how many groups a batched factory is cut, so that one is stepped while another decides.
        replay_buffer: what is collected is written there, and iteration yields None.
        trajs_per_batch: yield so many whole trajectories, as :class:`torchrl.collectors.BaseCollector` defines it.
        traj_format: ``padded`` (with a mask) or ``cat``.
        trajs_per_write: with ``trajs_per_batch`` and a replay buffer, trajectories per write to it.
        postproc: called with each batch; what it returns is yielded.
        storing_device: where batches are moved to; the CPU by default.
        exploration_type: of the replicas; that of this process is never touched.
        seed: root of all random streams: an env's episodes, and a VLA policy's noise, do not depend on timing.
        batch_sizes: sizes that forward passes are padded to, for CUDA graphs and ``torch.compile``.
        compile_policy: compile the replicas' policy.
        autocast: element type of the policy's matrix products.
        num_threads: torch's threads in a replica on the CPU.
        env_timeout_s: an env that takes longer for a step or a reset is replaced.
        start_timeout_s: an env that takes longer to be built ends the run.
        max_restarts: how often each worker is replaced when its env raises, dies or hangs, before that ends the run.
        max_text_bytes: longest text of an observation, in UTF-8.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    def __init__(
        self,
        create_env_fn: EnvSources,
        policy: Callable[[TensorDictBase], Any] | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        max_in_flight: int = 2,
        fragment_length: int | None = None,
        policy_devices: Sequence[str | torch.device] = ("cpu",),
        assignment: Sequence[int] | None = None,
        max_batch_size: int | None = None,
        max_wait_s: float = 0.0,
        async_interaction: bool = True,
        envs_per_worker: int = 1,
        num_stages: int = 1,
        replay_buffer: Any = None,
        trajs_per_batch: int | None = None,
        traj_format: Literal["padded", "cat"] = "padded",
        trajs_per_write: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        storing_device: str | torch.device | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        seed: int = 0,
        batch_sizes: Sequence[int] | None = None,
        compile_policy: bool = False,
        autocast: torch.dtype | None = None,
        num_threads: int = 1,
        env_timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        max_restarts: int = 3,
        max_text_bytes: int = 256,
    ) -> None:
        self.closed = True
        self._shards, self._single = make_shards(create_env_fn, envs_per_worker, num_stages)
        self.create_env_fn, self.policy = create_env_fn, policy
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self.total_frames, self.max_in_flight, self._fragment_length = total_frames, max_in_flight, fragment_length
        self.replay_buffer, self.trajs_per_batch, self.traj_format = replay_buffer, trajs_per_batch, traj_format
        self.trajs_per_write, self._postproc, self.storing_device = trajs_per_write, postproc, storing_device
        self._settings = FleetSettings(
            policy_devices=tuple(map(torch.device, policy_devices)),
            assignment=None if assignment is None else tuple(assignment),
            max_batch_size=max_batch_size,
            max_wait_s=max_wait_s,
            async_interaction=async_interaction,
            seed=seed,
            exploration_type=exploration_type,
            autocast=autocast,
            batch_sizes=None if batch_sizes is None else tuple(batch_sizes),
            compile_policy=compile_policy,
            num_threads=num_threads,
            env_timeout_s=env_timeout_s,
            start_timeout_s=start_timeout_s,
            max_restarts=max_restarts,
            max_text_bytes=max_text_bytes,
        )
        check_collector(self, len(self._shards))
        self._frames, self._iter, self.init_random_frames, self._version = 0, -1, 0, 0
        self._counts: RowCounts | None = None
        self._pending: Any = None
        self._ignore_rb = False
        self._writing, self._stopping = threading.Lock(), threading.Event()
        self._writer: threading.Thread | None = None
        self._writer_error: BaseException | None = None
        self._fleet: Fleet | None = None

    # ------------------------------------------------------------------ iteration

    @property
    def fleet(self) -> Fleet:
        """The processes; started if they are not running.

        Raises:
            WorkerError: if an env or the policy cannot be built.
            MemoryError: if the slab does not fit.
        """
        if self._fleet is None:
            self._fleet = self._open()
            self.closed = False
        return self._fleet

    def _open(self) -> Fleet:
        fleet = Fleet(self._shards, self._settings)
        ready = fleet.open()
        try:
            if isinstance(self.policy, VLAPolicy) and ready.env_spec is not None:
                self.policy.build(ready.env_spec)
            rows = fleet.num_rows
            self._T = self._fragment_length or -(-self.requested_frames_per_batch // rows)
            self._B = -(-self.requested_frames_per_batch // self._T)
            self.frames_per_batch = self._B * self._T
            if self.frames_per_batch != self.requested_frames_per_batch:
                warnings.warn(
                    f"frames_per_batch={self.requested_frames_per_batch} is not a multiple of fragments of {self._T}: each "
                    f"batch has {self.frames_per_batch}",
                    stacklevel=4,
                )
            slots = self.max_in_flight * self._B
            if slots < rows:
                raise ValueError(
                    f"max_in_flight={self.max_in_flight} batches of {self._B} fragments are fewer than the {rows} envs, some "
                    "of which could never run; raise frames_per_batch or max_in_flight, or lower fragment_length"
                )
            fleet.serve(
                self.policy,
                decisions=self._T,
                num_slots=slots,
                spans_episodes=True,
                version=self._version,
                counts=self._counts,
            )
            if self._pending is not None and fleet.publisher is not None:
                fleet.publisher.publish(self._version + 1, self._pending)
                self._version, self._pending = self._version + 1, None
        except BaseException:
            fleet.close(0.0)
            raise
        return fleet

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames``; the envs go on meanwhile, as far as ``max_in_flight`` lets them."""
        if self._writer is not None and threading.current_thread() is not self._writer:
            raise RuntimeError("start() collects in the background; call async_shutdown() before iterating")
        while (self.total_frames < 0 or self._frames < self.total_frames) and not self._stopping.is_set():
            fleet = self.fleet
            writes = self.replay_buffer is not None and not self._ignore_rb
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            slots = fleet.queue.take(self._B, self._version, None if writes else self.max_in_flight - 1)
            if not slots:
                return
            try:
                with self._writing:
                    batch = self._finish(fleet, slots)
                    if writes:
                        self._write(batch)
                        fleet.queue.release(slots)
                yield None if writes else batch
            finally:
                if not writes and self._fleet is fleet:
                    fleet.queue.release(slots)

    def _finish(self, fleet: Fleet, slots: list[int]) -> TensorDictBase:
        batch: TensorDictBase = fleet.slab.read(slots, length=self._T)
        assert MASK not in batch.keys(True), "a fragment is always full"
        if self._single and len(slots) == fleet.num_rows == 1:
            batch = batch[0]
        if self.storing_device is not None:
            batch = batch.to(self.storing_device)
        self._iter, self._frames = self._iter + 1, self._frames + batch.numel()
        if self._postproc is not None:
            batch = self._postproc(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _write(self, batch: TensorDictBase) -> None:
        dims = getattr(getattr(self.replay_buffer, "_storage", None), "ndim", 1)
        self.replay_buffer.extend(batch.reshape(-1) if dims == 1 else batch)

    # ------------------------------------------------------------------ in the background

    def start(self) -> None:
        """Collect into ``replay_buffer`` in the background, until ``total_frames`` or :meth:`async_shutdown`.

        Raises:
            RuntimeError: without a replay buffer, or if it was called before.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() writes to a replay buffer, but replay_buffer is None")
        if self._writer is not None:
            raise RuntimeError("start() was called before; call async_shutdown() first")
        _ = self.fleet  # so that what cannot start is said here
        self._iteration_started = True
        self._writer = threading.Thread(target=self._write_on, name="vla-async-collector", daemon=True)
        self._writer.start()

    def _write_on(self) -> None:
        try:
            for _ in iter(self):
                pass
        except Exception as error:  # noqa: BLE001 - it is raised by the next call of the thread that started this one
            self._writer_error = error

    @contextmanager
    def pause(self, timeout: float | None = 30.0, *, resume: bool = True) -> Iterator[None]:
        """A block in which the replicas answer nothing and nothing is written to the replay buffer.

        Args:
            timeout: not used: a replica finishes at most one batch.
            resume: whether to go on after the block.
        """
        if self._fleet is None:
            yield
            return
        with self._writing:
            self._fleet.pause()
            try:
                yield
            finally:
                if resume:
                    self._fleet.resume()

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    # ------------------------------------------------------------------ weights

    @property
    def policy_version(self) -> int:
        """How often the weights were updated."""
        return self._version

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        """Publish weights: those given in any form, or the policy's own. Each call is one version more."""
        if model_id not in (None, "policy"):
            raise KeyError(f"model_id={model_id!r}: the only model of this collector is 'policy'")
        if self._fleet is None:
            self._pending = policy_or_weights if policy_or_weights is not self.policy else None
            self._version += self._pending is None
        elif self._fleet.publisher is not None:
            self._fleet.publisher.publish(self._version + 1, policy_or_weights)
            self._version += 1

    # ------------------------------------------------------------------ state

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all random streams; running envs are restarted, and what was under way is given up.

        Returns:
            The seed of the collector that follows: the same if ``static_seed``, else the next.
        """
        self._stop_fleet(0.7)
        self._counts, self._settings = None, dataclasses.replace(self._settings, seed=seed)
        return seed if static_seed else seed + 1

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start all envs anew, with the episodes that come next; what was under way is given up."""
        self._stop_fleet(0.7)
        self._flush_trajectory_assembly()

    def state_dict(self) -> OrderedDict[str, Any]:
        """How far the collector and the random streams are. It can be asked for at any time."""
        counts = self._counts if self._fleet is None else self._fleet.counts
        state = OrderedDict(frames=self._frames, iter=self._iter, policy_version=self._version, seed=self._settings.seed)
        return OrderedDict(state, counts=None if counts is None else dataclasses.asdict(counts))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Go on from a state: with its counts, its seed, and episodes that had not begun then."""
        self._stop_fleet(0.7)
        self._frames, self._iter, self._version = state_dict["frames"], state_dict["iter"], state_dict["policy_version"]
        self._settings = dataclasses.replace(self._settings, seed=state_dict["seed"])
        self._counts = None if state_dict["counts"] is None else RowCounts(**state_dict["counts"])

    def stats(self) -> dict[str, Any]:
        """What TorchRL's collectors tell, and what the processes have done since they started.

        Returns:
            Beside TorchRL's: all of :func:`vla_async.collectors.tally.summary`, ``env_steps``, ``env_steps/per_worker``,
            ``worker/busy_s`` (per worker), ``worker/idle_share``, ``queue/ready``, ``restarts``, ``uptime_s``, and the
            counts of the queue.
        """
        stats: dict[str, Any] = super().stats()
        if self._fleet is None:
            return stats
        fleet, board = self._fleet, self._fleet.board
        uptime = fleet.uptime_s
        stats |= summary(fleet.tallies)
        stats |= {f"queue/{name}": number for name, number in fleet.queue.counts().items()}
        stats |= {"env_steps": int(board.env_steps.sum()), "env_steps/per_worker": board.env_steps.tolist()}
        stats |= {"worker/busy_s": board.busy.tolist(), "worker/idle_share": 1.0 - float(board.busy.mean()) / uptime}
        return stats | {"worker/waiting_for_slots_s": board.waiting.tolist(), "restarts": fleet.restarts, "uptime_s": uptime}

    # ------------------------------------------------------------------ end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all processes. Iterating again starts new ones.

        Args:
            timeout: how long processes may take to end by themselves, in seconds.
            close_env: not used: an env ends with its process.
            raise_on_error: raise what :meth:`start` failed with.
        """
        self._stopping.set()
        self._stop_fleet(0.7 if timeout is None else timeout)
        self._stopping.clear()
        self.closed = True
        error, self._writer_error = self._writer_error, None
        if error is not None and raise_on_error:
            raise RuntimeError("collecting in the background failed") from error

    def _stop_fleet(self, grace_s: float) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is None:
            return
        self._counts = fleet.counts
        writer, self._writer = self._writer, None
        if writer is not None and writer is not threading.current_thread():
            fleet.interrupt()
            writer.join()
        fleet.close(grace_s)

    @property
    def env(self) -> EnvSources:
        """What builds the envs; they live in other processes."""
        return self.create_env_fn

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self._stop_fleet(0.2)


def make_shards(create_env_fn: EnvSources, envs_per_worker: int, num_stages: int) -> tuple[list[list[EnvSource]], bool]:
    """The envs of each worker, and whether there is just one callable.

    Raises:
        ValueError: if they cannot be cut that way.
    """
    if envs_per_worker < 1:
        raise ValueError(f"envs_per_worker={envs_per_worker} must be at least 1")
    batched = isinstance(create_env_fn, EnvFactory) and create_env_fn.is_batched
    if num_stages != 1 and not batched:
        raise ValueError(
            f"num_stages={num_stages} cuts a batched factory into groups, but these envs are not batched; set it to 1"
        )
    if isinstance(create_env_fn, EnvFactory):
        if not batched:
            sources = [EnvSource(create_env_fn, index) for index in range(create_env_fn.num_envs)]
        else:
            if num_stages < 1 or create_env_fn.num_envs % num_stages:
                raise ValueError(f"num_stages={num_stages} must divide env.num_envs={create_env_fn.num_envs}")
            part = dataclasses.replace(create_env_fn, num_envs=create_env_fn.num_envs // num_stages)
            return [[EnvSource(part)] * num_stages], False
    elif callable(create_env_fn):
        return [[EnvSource(create_env_fn)]], True
    else:
        sources = [EnvSource(make) for make in create_env_fn]
    if not sources or not all(isinstance(source.make, EnvFactory) or callable(source.make) for source in sources):
        raise ValueError(
            "create_env_fn must be an EnvFactory, a callable that returns an EnvBase, or a list of such callables"
        )
    return [sources[start : start + envs_per_worker] for start in range(0, len(sources), envs_per_worker)], False


def check_collector(collector: StreamingCollector, num_workers: int) -> None:
    """Refuse settings that cannot work, before any process starts.

    Raises:
        ValueError: names the setting, its value and the fix.
    """
    settings = collector._settings
    least = {"frames_per_batch": 1, "max_in_flight": 1, "_fragment_length": 1, "trajs_per_batch": 1}
    for name, value in {name: getattr(collector, name) for name in least}.items():
        if value is not None and value < least[name]:
            raise ValueError(f"{name.strip('_')}={value} must be at least {least[name]}")
    for name in ("max_batch_size", "num_threads", "max_text_bytes"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for name in ("env_timeout_s", "start_timeout_s"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}={getattr(settings, name)} must be a positive number of seconds")
    if not settings.max_wait_s >= 0:
        raise ValueError(f"max_wait_s={settings.max_wait_s} must be 0 or a positive number of seconds")
    if settings.max_restarts < 0:
        raise ValueError(f"max_restarts={settings.max_restarts} must not be negative")
    if not settings.policy_devices:
        raise ValueError("policy_devices is empty; give at least one device, for example ['cpu']")
    given, replicas = settings.assignment, len(settings.policy_devices)
    if given is not None and (len(given) != num_workers or not all(0 <= replica < replicas for replica in given)):
        raise ValueError(
            f"assignment={given} must give each of the {num_workers} workers a replica from 0 to {replicas - 1}"
        )
    if collector.policy is not None and not callable(collector.policy):
        raise ValueError(
            f"policy={type(collector.policy).__name__} must be callable with a TensorDict, or None to act at random"
        )
    if isinstance(collector.policy, nn.Module) and collector.traj_format not in ("padded", "cat"):
        raise ValueError(f"traj_format={collector.traj_format!r}: choose padded or cat")
