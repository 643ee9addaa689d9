"""What a run will take of each memory, estimated before it begins. What cannot fit is refused, with the numbers.

Weights, gradients, the optimizer's state and what lies in shared memory are counted. What the backward pass keeps is
measured on one decision, times the micro-batch. Simulators and an evaluation beside training are not known, and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from vla_async.collectors.slab import human_bytes
from vla_async.loops.base import Loop
from vla_async.loops.sft import SFTLoop
from vla_async.loops.streaming import StreamingFitLoop
from vla_async.loops.sync import SyncFitLoop
from vla_async.monitor.report import Table
from vla_async.policies.base import VLAPolicy
from vla_async.policies.measuring import Decision, measure_decision, total_bytes
from vla_async.shared_memory import free_shared_memory, host_memory_left
from vla_async.weights.publisher import named_tensors, published_names

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

HOST, SHARED = "host", "shared memory"  # a part of the host's


@dataclass(frozen=True)
class Part:
    """One thing that takes memory.

    Attributes:
        name: what it is.
        place: where: ``host``, ``shared memory``, or a device such as ``cuda:0``.
        nbytes: how much.
        lower: the settings that make it smaller.
        is_held: whether it is there already, so that what is free does not count it any more.
    """

    name: str
    place: str
    nbytes: int
    lower: str
    is_held: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """All that is known to take memory in a run.

    Attributes:
        parts: the largest things.
    """

    parts: tuple[Part, ...]

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(part.place for part in self.parts))

    def total(self, place: str) -> int:
        """Bytes in one place."""
        return sum(part.nbytes for part in self.parts if part.place == place)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON: bytes of each part by its place and name."""
        return {
            place: {part.name: part.nbytes for part in self.parts if part.place == place} | {"total": self.total(place)}
            for place in self.places
        }

    def table(self) -> Table:
        """Everything in one table, with what is free in each place."""
        names = dict.fromkeys(part.name for part in self.parts)
        sizes = {(part.name, part.place): part.nbytes for part in self.parts}
        rows = [[name, *(human_bytes(sizes.get((name, place), 0)) for place in self.places)] for name in names]
        rows.append(["total", *(human_bytes(self.total(place)) for place in self.places)])
        rows.append(["still free", *(human_bytes(free_bytes(place)) for place in self.places)])
        return Table(["memory, estimated", *self.places], rows)

    def check(self) -> None:
        """Refuse what cannot fit.

        Raises:
            MemoryError: says how much is needed where, for what, how much is free, and which settings to lower.
        """
        for place in self.places:
            # shared memory is the host's, too
            missing = [part for part in self.parts if not part.is_held and part.place in (place, place == HOST and SHARED)]
            needed, free = sum(part.nbytes for part in missing), free_bytes(place)
            if needed > free:
                missing.sort(key=lambda part: -part.nbytes)
                parts = ", ".join(f"{part.name} {human_bytes(part.nbytes)}" for part in missing)
                fixes = "; ".join(dict.fromkeys(part.lower for part in missing if part.nbytes > needed / 10))
                raise MemoryError(
                    f"the run would need {human_bytes(needed)} of {place} beyond what it has, but {human_bytes(free)} are "
                    f"free: {parts}. Set {fixes}. This is an estimate: trainer.check_memory=false goes on without"
                )


def free_bytes(place: str) -> int:
    """What is free in a place, see :class:`Part`."""
    if place == HOST:
        return host_memory_left()
    if place == SHARED:
        return free_shared_memory()
    # what torch has set aside and does not use is free for torch
    device = torch.device(place)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def place_of(device: torch.device) -> str:
    """The place of what lies on a device."""
    return HOST if device.type == "cpu" else str(device)


def check_weights_fit(policy: nn.Module, device: torch.device) -> None:
    """Refuse a policy whose weights alone are too many for a GPU, before they are sent there.

    Raises:
        MemoryError: see :meth:`MemoryEstimate.check`.
    """
    if device.type != "cpu":
        weights = total_bytes(named_tensors(policy).values())
        MemoryEstimate((Part("weights", place_of(device), weights, _of_model(policy, dtype="bfloat16")),)).check()


@dataclass(frozen=True)
class Work:
    """How many decisions a loop deals with at once.

    Attributes:
        micro_batch: in a forward and backward pass.
        batch: kept on the device that trains.
        rows: of the slab.
        replicas: the devices of the policy's copies that act in other processes.
        section: of the configuration, where the settings of the loop stand.
    """

    micro_batch: int
    batch: int
    rows: int = 0
    replicas: tuple[torch.device, ...] = ()
    section: str = "fit_loop"


def work_of(loop: Loop, trainer: AsyncTrainer) -> Work:
    """What a loop of ours deals with; of another kind nothing is known."""
    ranks = trainer.ranks.settings.num_ranks
    if isinstance(loop, SFTLoop):
        batch = -(-loop.batch_size // ranks)
        return Work(min(loop.micro_batch_size or batch, batch), batch, section="sft_loop")
    if isinstance(loop, StreamingFitLoop):
        plan = loop.plan(trainer)
        batch = -(-plan.slots * plan.decisions // ranks)
        rows_per_slot = plan.decisions + 1 if plan.grouping else 2 * plan.decisions + 1
        rows = (loop.max_staleness + 1) * plan.slots * rows_per_slot
        replicas = tuple(loop.placement.replicas(trainer.ranks.settings.devices))
        return Work(_micro_batch(loop, batch), batch, rows, replicas)
    if isinstance(loop, SyncFitLoop):
        batch = trainer.env.num_envs * loop.decisions_per_env
        return Work(_micro_batch(loop, batch), batch)
    return Work(0, 0)


def _micro_batch(loop: SyncFitLoop, batch: int) -> int:
    """The largest; where it is not set, a mini-batch is one."""
    return min(loop.micro_batch_size or loop.mini_batch_size or batch, batch)


def estimate_memory(
    policy: VLAPolicy, optimizer: Optimizer, device: torch.device, work: Work, decision: Decision, *, shards: int = 1
) -> MemoryEstimate:
    """Add up what a run takes.

    Args:
        policy: built, on ``device``.
        optimizer: that trains it.
        device: that trains; all ranks of a CPU are to be counted by the caller.
        work: of the loop.
        decision: see :func:`measure_decision`.
        shards: into how many parts the optimizer's state is cut (FSDP2).
    """
    tensors, here = named_tensors(policy), place_of(device)
    weights, state = total_bytes(tensors.values()), _optimizer_bytes(optimizer)
    trained = total_bytes(parameter for parameter in policy.parameters() if parameter.requires_grad)
    published = total_bytes(tensors[name] for name in published_names(policy))
    reference = trained if getattr(policy.objective, "kl_coef", 0.0) else 0
    share = 1.0 / shards if shards > 1 else 0.0  # a shard of the weights and the gradients beside the whole ones
    trained_less = _of_model(policy, lora="{rank: 32}", freeze="vision")
    row, loop = decision.seen + decision.made, work.section
    batch = f"{loop}.fragments_per_update or decisions_per_env" if loop == "fit_loop" else f"{loop}.batch_size"
    parts = [
        Part("weights", here, weights + int(weights * share), _of_model(policy, dtype="bfloat16"), is_held=True),
        Part("gradients", here, trained + int(trained * share), trained_less),
        Part("optimizer", here, state // shards, trained_less),
        Part("reference of kl_coef", here, reference, "model.objective.kl_coef=0"),
        Part(
            "activations",
            here,
            decision.kept * work.micro_batch,
            f"{loop}.micro_batch_size={max(1, work.micro_batch // 2)} or less, or "
            + _of_model(policy, gradient_checkpointing="true"),
        ),
        Part("global batch", here, (row + decision.seen) * work.batch, batch),
        # a checkpoint of an update that is cut short is that of the last one; what is frozen need not be copied
        Part("state of the last update", HOST, trained + state, trained_less),
        Part("slab", SHARED, row * work.rows, "fit_loop.max_staleness, fragments_per_update or decisions_per_env"),
        Part("weights to publish", SHARED, 2 * published if work.replicas else 0, trained_less),
    ]
    for replica in dict.fromkeys(work.replicas):
        copies = work.replicas.count(replica) * weights
        parts.append(Part("replicas", place_of(replica), copies, "fit_loop.placement.rollout_devices to fewer"))
    return MemoryEstimate(tuple(_added(part for part in parts if part.nbytes)))


def _of_model(policy: nn.Module, **settings: str) -> str:
    """The settings of these that the policy has."""
    known: Any = getattr(policy, "hparams", {})
    return " or ".join(f"model.{name}={value}" for name, value in settings.items() if name in known) or "a smaller model"


def _added(parts: Iterable[Part]) -> list[Part]:
    """Parts with the same name in the same place as one."""
    found: dict[tuple[str, str], Part] = {}
    for part in parts:
        same = found.get((part.name, part.place))
        size = part.nbytes + (same.nbytes if same else 0)
        found[part.name, part.place] = dataclasses.replace(part, nbytes=size)
    return list(found.values())


def _optimizer_bytes(optimizer: Optimizer) -> int:
    """What the state will take, by the options that the usual optimizers have: two moments of Adam's kin, one momentum."""
    total = 0
    for group in optimizer.param_groups:
        moments = 2 if "betas" in group else int(bool(group.get("momentum")))
        total += (moments + bool(group.get("amsgrad"))) * total_bytes(group["params"])
    return total


def report_memory(trainer: AsyncTrainer, loop: Loop) -> MemoryEstimate:
    """Print what a run will take, and refuse what cannot fit.

    Raises:
        MemoryError: see :meth:`MemoryEstimate.check`.
    """
    settings, device, policy = trainer.ranks.settings, trainer.fabric.device, trainer.policy
    work = work_of(loop, trainer)
    decision = measure_decision(policy, device, trainer.fabric.autocast(), imitate=loop.stage == "sft")
    shards = settings.num_ranks if settings.strategy == "size_weighted_fsdp" else 1
    estimate = estimate_memory(policy, trainer.state.optimizer, device, work, decision, shards=shards)
    if device.type == "cpu" and settings.num_ranks > 1:
        estimate = _on_every_rank(estimate, settings.num_ranks)
    estimate.table().print()
    estimate.check()
    return estimate


def _on_every_rank(estimate: MemoryEstimate, ranks: int) -> MemoryEstimate:
    """The estimate of one rank, where all of them share the host's memory; one of them acts for all."""
    shared = ("slab", "weights to publish", "replicas")
    return MemoryEstimate(
        tuple(
            part if part.name in shared else dataclasses.replace(part, nbytes=part.nbytes * ranks) for part in estimate.parts
        )
    )
