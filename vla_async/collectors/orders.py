"""What a fleet and its processes tell each other before the rollouts begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs.utils import ExplorationType

from vla_async.collectors.board import Board
from vla_async.collectors.slab import Key, Leaf, Slab
from vla_async.collectors.tally import Tally
from vla_async.collectors.wires import EnvAddress
from vla_async.envs.base import EnvSpec
from vla_async.monitor.timeline_track import Track
from vla_async.weights.publisher import SharedWeights


@dataclass(frozen=True)
class EnvsReady:
    """A worker's first message: its envs are built."""

    num_rows: list[int]
    leaves: tuple[Leaf, ...]
    action_specs: dict[Key, TensorSpec]
    env_spec: EnvSpec | None


@dataclass(frozen=True)
class WorkerOrders:
    """What a worker is told once the slab exists.

    Attributes:
        slab: where to write.
        board: shared bookkeeping.
        envs: its envs.
        generation: how many workers have had this place before.
        seed: root of the envs' random streams.
        lockstep: whether a replica has to know who waits for a slot.
        track: where it records what it does; None if nobody wants to know.
    """

    slab: Slab
    board: Board
    envs: list[EnvAddress]
    generation: int
    seed: int
    lockstep: bool
    track: Track | None = None


@dataclass(frozen=True)
class ReplicaSettings:
    """How a replica works.

    Attributes:
        device: where the policy computes.
        max_batch_size: Bmax, in rows.
        max_wait_s: Tmax, in seconds.
        lockstep: answer only when all envs of the replica have asked.
        seed: of torch's generators, for policies that draw from them.
        exploration_type: what the policy samples.
        autocast: see :class:`ActingPolicy`.
        batch_sizes: see :class:`ActingPolicy`.
        compile_policy: compile the policy with ``torch.compile`` (with CUDA graphs on a GPU).
        num_threads: torch's threads, on a CPU.
    """

    device: torch.device
    max_batch_size: int
    max_wait_s: float
    lockstep: bool
    seed: int
    exploration_type: ExplorationType
    autocast: torch.dtype | None = None
    batch_sizes: tuple[int, ...] | None = None
    compile_policy: bool = False
    num_threads: int = 1


@dataclass(frozen=True)
class ReplicaReady:
    """A replica's first message: what its policy writes, and whether it has a critic."""

    writes: list[Leaf]
    has_value: bool


@dataclass(frozen=True)
class ReplicaOrders:
    """What a replica is told once the slab exists.

    Attributes:
        slab: where to read and write.
        board: shared bookkeeping.
        envs: the envs that it answers.
        weights: where newer weights will lie.
        tally: what it counts.
        request_base: int64 ``[N]``; a row's k-th decision has the key ``base + k``.
        track: where it records what it does; None if nobody wants to know.
        torch_trace: the file for torch's profile of the time in which it records; None for none.
    """

    slab: Slab
    board: Board
    envs: list[EnvAddress]
    weights: SharedWeights | None
    tally: Tally
    request_base: Tensor
    track: Track | None = None
    torch_trace: Path | None = None


class FleetOptions(TypedDict, total=False):
    """The arguments of :class:`FleetSettings`, all of them optional."""

    policy_devices: Sequence[str | torch.device]
    assignment: Sequence[int] | None
    max_batch_size: int | None
    max_wait_s: float
    async_interaction: bool
    seed: int
    exploration_type: ExplorationType
    autocast: torch.dtype | None
    batch_sizes: Sequence[int] | None
    compile_policy: bool
    num_threads: int
    env_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    max_text_bytes: int


@dataclass(frozen=True)
class FleetSettings:
    """How the processes of a rollout work.

    Args:
        policy_devices: one replica of the policy on each.
        assignment: for each worker, the replica that answers it; round-robin by default.
        max_batch_size: Bmax, the most rows in a forward pass; by default all that a replica has.
        max_wait_s: Tmax, how long the oldest request waits for others to join its batch.
        async_interaction: False is the lockstep baseline: the envs of a replica decide together.
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

    policy_devices: Sequence[str | torch.device] = ("cpu",)
    assignment: Sequence[int] | None = None
    max_batch_size: int | None = None
    max_wait_s: float = 0.0
    async_interaction: bool = True
    seed: int = 0
    exploration_type: ExplorationType = ExplorationType.RANDOM
    autocast: torch.dtype | None = None
    batch_sizes: Sequence[int] | None = None
    compile_policy: bool = False
    num_threads: int = 1
    env_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    max_restarts: int = 3
    max_text_bytes: int = 256

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "num_threads", "max_text_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("env_timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be a positive number of seconds")
        if not 0 <= self.max_wait_s < float("inf"):  # an env without a slot would be waited for, for ever
            raise ValueError(f"max_wait_s={self.max_wait_s} must be a finite number of seconds, 0 or more")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} must not be negative")
        if not self.policy_devices:
            raise ValueError("policy_devices is empty; give at least one device, for example ['cpu']")
        if self.batch_sizes is not None and min(self.batch_sizes, default=0) < 1:
            raise ValueError(f"batch_sizes={list(self.batch_sizes)} must be one or more sizes of at least 1, or None")

    def of_replica(self, device: torch.device) -> ReplicaSettings:
        """The settings of the replica on a device."""
        return ReplicaSettings(
            device=device,
            max_batch_size=self.max_batch_size or 2**31,
            max_wait_s=self.max_wait_s,
            lockstep=not self.async_interaction,
            seed=self.seed,
            exploration_type=self.exploration_type,
            autocast=self.autocast,
            batch_sizes=None if self.batch_sizes is None else tuple(self.batch_sizes),
            compile_policy=self.compile_policy,
            num_threads=self.num_threads,
        )

    @property
    def devices(self) -> list[torch.device]:
        """The device of each replica."""
        return [torch.device(device) for device in self.policy_devices]


@dataclass(frozen=True)
class RowCounts:
    """How far the random streams of each row are: its decisions and the episodes it has started, each of length N."""

    decisions: list[int]
    episodes: list[int]
