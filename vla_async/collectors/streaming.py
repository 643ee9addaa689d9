"""``StreamingCollector``: a TorchRL collector whose envs never wait for each other."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from typing_extensions import Unpack

from vla_async.collectors.background import BackgroundCollector
from vla_async.collectors.fleet import Fleet
from vla_async.collectors.orders import FleetOptions, FleetSettings, RowCounts
from vla_async.collectors.pool import warm_up
from vla_async.collectors.shards import EnvSources, check_assignment, check_counts, check_slots, make_shards
from vla_async.collectors.slab import MASK
from vla_async.policies.base import VLAPolicy


class StreamingCollector(BackgroundCollector):
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
        envs_per_worker: how many of the envs share a process.
        num_stages: into how many groups a batched factory is cut, so that one is stepped while another decides.
        replay_buffer: what is collected is written there, and iteration yields None.
        trajs_per_batch: yield so many whole trajectories, as :class:`torchrl.collectors.BaseCollector` defines it.
        traj_format: ``padded`` (with a mask) or ``cat``.
        trajs_per_write: with ``trajs_per_batch`` and a replay buffer, trajectories per write to it.
        postproc: called with each batch; what it returns is yielded.
        storing_device: where batches are moved to; the CPU by default.
        settings: of the processes, see :class:`FleetSettings`: ``policy_devices``, ``max_batch_size``, ``max_wait_s``,
            ``async_interaction``, ``seed``, ``env_timeout_s``, ``max_restarts`` and more.

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
        envs_per_worker: int = 1,
        num_stages: int = 1,
        replay_buffer: Any = None,
        trajs_per_batch: int | None = None,
        traj_format: Literal["padded", "cat"] = "padded",
        trajs_per_write: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        storing_device: str | torch.device | None = None,
        **settings: Unpack[FleetOptions],
    ) -> None:
        super().__init__()
        self._shards, self._single = make_shards(create_env_fn, envs_per_worker, num_stages)
        self.create_env_fn, self.policy = create_env_fn, policy
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self.total_frames, self.max_in_flight, self._fragment_length = total_frames, max_in_flight, fragment_length
        self.replay_buffer, self.trajs_per_batch, self.traj_format = replay_buffer, trajs_per_batch, traj_format
        self.trajs_per_write, self._postproc, self.storing_device = trajs_per_write, postproc, storing_device
        self._settings = FleetSettings(**settings)
        check_counts(frames_per_batch=frames_per_batch, max_in_flight=max_in_flight)
        check_counts(fragment_length=fragment_length, trajs_per_batch=trajs_per_batch)
        if traj_format not in ("padded", "cat"):
            raise ValueError(f"traj_format={traj_format!r}: choose padded or cat")
        if getattr(getattr(replay_buffer, "_storage", None), "ndim", 1) != 1:
            raise ValueError(
                "replay_buffer has a storage with ndim > 1, whose rows are one env each, but the rows of a batch are those "
                "that were ready first; use ndim=1, and tell trajectories apart by ('collector', 'traj_ids')"
            )
        check_assignment(self._settings, len(self._shards))
        self._frames, self._iter, self.init_random_frames, self._version = 0, -1, 0, 0
        self._counts: RowCounts | None = None
        self._pending: Any = None
        self._fleet: Fleet | None = None
        warm_up()  # while the caller goes on

    # ------------------------------------------------------------------ iteration

    @property
    def fleet(self) -> Fleet:
        """The processes; started if they are not running.

        Raises:
            WorkerError: if an env or the policy cannot be built.
            MemoryError: if the slab does not fit.
        """
        return self._ensure_open()

    def _ensure_open(self) -> Fleet:
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
            check_slots(
                fleet.envs,
                not self._settings.async_interaction,
                max_in_flight=self.max_in_flight,
                fragments=self._B,
                fragment_length=self._T,
            )
            fleet.serve(
                self.policy,
                decisions=self._T,
                num_slots=self.max_in_flight * self._B,
                version=self._version,
                weights=self._pending,
                counts=self._counts,
            )
            self._pending = None
            if fleet.publisher is None:
                self._version = 0  # without weights there is nothing to update
        except BaseException:
            fleet.close(0.0)
            raise
        return fleet

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames``; the envs go on meanwhile, as far as ``max_in_flight`` lets them."""
        if self._writer is not None and threading.current_thread() is not self._writer:
            raise RuntimeError("start() collects in the background; call async_shutdown() before iterating")
        # a fragment that was dropped for its age would leave a hole in its trajectory; a replay buffer minds no age
        bounded = self.replay_buffer is None and self.trajs_per_batch is None
        while self.total_frames < 0 or self._frames < self.total_frames:
            self._set_busy(False)
            fleet = self._fleet if threading.current_thread() is self._writer else self._ensure_open()
            if fleet is None or self._stopping.is_set():
                return
            if self._lent:  # whoever had them, asks for more now
                fleet.queue.release(self._lent)
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            self._lent = fleet.queue.take(self._B, self._version, self.max_in_flight - 1 if bounded else None)
            self._set_busy(True)
            if not self._lent or self._stopping.is_set():
                return
            batch = self._finish(fleet, self._lent)
            writes = self.replay_buffer is not None and not self._ignore_rb
            if writes:
                self.replay_buffer.extend(batch.reshape(-1))
            yield None if writes else batch

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

    # ------------------------------------------------------------------ weights

    @property
    def policy_version(self) -> int:
        """How often the weights were updated."""
        return self._version

    def _weight_update_impl(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if worker_ids is not None:
            raise ValueError(f"worker_ids={worker_ids}: all replicas hold the same weights; leave it out")
        if weights_dict and policy_or_weights is None and model_id is None and not self._weight_sync_schemes:
            for model_id, weights in weights_dict.items():  # TorchRL's own forgets them where there is no scheme
                self._maybe_fallback_update(weights, model_id=model_id)
            return
        super()._weight_update_impl(policy_or_weights, model_id=model_id, weights_dict=weights_dict, **kwargs)

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        """Publish weights: those given in any form, or the policy's own. Each call is one version more."""
        if model_id not in (None, "policy"):
            raise KeyError(f"model_id={model_id!r}: the only model of this collector is 'policy'")
        self._raise_writer_error()
        if self._fleet is None:
            self._pending = policy_or_weights if policy_or_weights is not self.policy else None
            self._version += 1
        elif self._fleet.publisher is not None:
            self._fleet.publisher.publish(self._version + 1, policy_or_weights)
            self._version += 1

    # ------------------------------------------------------------------ state

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all random streams; running envs are restarted, and what was under way is given up.

        Returns:
            The seed of the collector that follows: the same if ``static_seed``, else the next.
        """
        with self._stopped():
            self._counts, self._settings = None, dataclasses.replace(self._settings, seed=seed)
            self._flush_trajectory_assembly()
        return seed if static_seed else seed + 1

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start all envs anew, with the episodes that come next; what was under way is given up."""
        with self._stopped():
            self._flush_trajectory_assembly()

    def state_dict(self) -> OrderedDict[str, Any]:
        """How far the collector and the random streams are. It can be asked for at any time."""
        counts = self._counts if self._fleet is None else self._fleet.counts
        state = OrderedDict(frames=self._frames, iter=self._iter, policy_version=self._version, seed=self._settings.seed)
        return OrderedDict(state, counts=None if counts is None else dataclasses.asdict(counts))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Go on from a state: with its counts, its seed, and episodes that had not begun then."""
        with self._stopped():
            self._frames, self._iter, self._version = state_dict["frames"], state_dict["iter"], state_dict["policy_version"]
            self._settings = dataclasses.replace(self._settings, seed=state_dict["seed"])
            self._counts = None if state_dict["counts"] is None else RowCounts(**state_dict["counts"])
            self._pending = None
            self._flush_trajectory_assembly()

    def stats(self) -> dict[str, Any]:
        """What TorchRL's collectors tell, and what the processes have done since they started (:meth:`Fleet.stats`)."""
        stats: dict[str, Any] = super().stats()
        if self._fleet is None:
            return stats
        return stats | self._fleet.stats()

    @property
    def env(self) -> EnvSources:
        """What builds the envs; they live in other processes."""
        return self.create_env_fn
