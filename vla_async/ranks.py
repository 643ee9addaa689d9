"""``Ranks``: the processes that train together, as one of them sees it.

Rank 0 owns everything but the training: envs, replicas, counters, metrics, the run directory. The other ranks of the host
train on what it deals to them, and end with the run.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed

from vla_async.links import FollowingLink, LeadingLinks, local_address
from vla_async.monitor.metrics import Meter
from vla_async.rng import fold
from vla_async.strategies import SizeWeightedDDPStrategy, SizeWeightedFSDPStrategy, SizeWeightedSingleDeviceStrategy
from vla_async.strategies.ranks import DEFAULT_TIMEOUT_S
from vla_async.strategies.size_weighted import SizeWeighted

if TYPE_CHECKING:
    from vla_async.objectives.base import Objective
    from vla_async.state import TrainState

StrategyName = Literal["auto", "size_weighted_ddp", "size_weighted_fsdp"]
_STRATEGIES: dict[str, Callable[..., SizeWeighted]] = {
    "size_weighted_ddp": SizeWeightedDDPStrategy,
    "size_weighted_fsdp": SizeWeightedFSDPStrategy,
}


@dataclass(frozen=True)
class RankSettings:
    """How many ranks train, and how they come together.

    Args:
        strategy: ``auto`` for one device; ``size_weighted_ddp`` or ``size_weighted_fsdp`` for several ranks.
        num_ranks: ranks on this host.
        timeout_s: how long one of them waits for another.
        accelerator: ``cpu`` or ``cuda``.
        device: index of the first device; rank i has the i-th after it. On the CPU all ranks share it.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    strategy: StrategyName = "auto"
    num_ranks: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    accelerator: Literal["cpu", "cuda"] = "cpu"
    device: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", *_STRATEGIES):
            raise ValueError(f"trainer.strategy={self.strategy!r}: choose auto, size_weighted_ddp or size_weighted_fsdp")
        if self.num_ranks < 1:
            raise ValueError(f"trainer.num_ranks={self.num_ranks} must be at least 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"trainer.rank_timeout_s={self.timeout_s} must be positive and finite")
        if self.several and self.strategy == "auto":
            raise ValueError(
                f"trainer.strategy='auto' is one device, but trainer.num_ranks={self.num_ranks}; set trainer.strategy to "
                "size_weighted_ddp or size_weighted_fsdp"
            )
        if not self.several and self.strategy != "auto":
            raise ValueError(
                f"trainer.strategy={self.strategy!r} is for several ranks, but trainer.num_ranks=1; raise it, or set "
                "trainer.strategy to auto"
            )
        if self.several and not sys.platform.startswith("linux"):
            raise ValueError(f"trainer.num_ranks={self.num_ranks} needs Linux; set it to 1 here")
        known = torch.cuda.device_count()
        if self.several and self.accelerator == "cuda" and self.device + self.num_ranks > known:
            raise ValueError(
                f"trainer.num_ranks={self.num_ranks} from trainer.device={self.device} on needs CUDA devices up to "
                f"{self.device + self.num_ranks - 1}, but torch sees {known}; lower one of them"
            )

    @property
    def several(self) -> bool:
        return self.num_ranks > 1

    @property
    def devices(self) -> list[torch.device]:
        """The devices that train, each once."""
        if self.accelerator == "cpu":
            return [torch.device("cpu")]
        return [torch.device("cuda", self.device + rank) for rank in range(self.num_ranks)]


class Ranks:
    """The ranks of a trainer. With one of them, nothing here does anything.

    Attributes:
        settings: how many there are.
        rank: which of them this process is; before :meth:`launch`, by the environment.
        links: to the others, on rank 0.
        link: to rank 0, on the others.
        meeting: makes the context in which this one waits for the others, for a loop that wants to know how long.
    """

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.rank = int(os.environ.get("LOCAL_RANK", "0")) if settings.several else 0
        self.links: LeadingLinks | None = None
        self.link: FollowingLink | None = None
        self.meeting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._strategy: SizeWeighted = SizeWeightedSingleDeviceStrategy()
        self._launched = False

    @property
    def several(self) -> bool:
        """Whether there are more than this one."""
        return self.settings.several

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which keeps the books."""
        return self.rank == 0

    # ------------------------------------------------------------------ beginning and end

    def launch(self, precision: Any, loggers: Sequence[Any]) -> Fabric:
        """Start the other ranks, unless they were started from outside (as by torchrun), and meet them.

        Raises:
            RuntimeError: if that cannot be done.
        """
        settings = self.settings
        if "LOCAL_RANK" in os.environ and "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                "this process has trained on several ranks before, and the other ranks ended with that; give each training "
                "a script of its own, or set trainer.num_ranks=1"
            )
        if (size := int(os.environ.get("WORLD_SIZE", settings.num_ranks))) != settings.num_ranks:
            raise RuntimeError(
                f"the launcher has started {size} ranks, but trainer.num_ranks={settings.num_ranks}; make them the same "
                "(ranks on several hosts are not supported)"
            )
        strategy = _STRATEGIES[settings.strategy](timeout=settings.timeout_s)
        on_cuda = settings.accelerator == "cuda"
        devices: Any = [device.index for device in settings.devices] if on_cuda else settings.num_ranks
        fabric = Fabric(
            accelerator=settings.accelerator, devices=devices, strategy=strategy, precision=precision, loggers=[*loggers]
        )
        environment = cast(Any, strategy).cluster_environment
        cast(Any, strategy)._launcher = _Launcher(environment, settings.num_ranks, self)
        self._strategy, self._launched = strategy, True
        try:
            fabric.launch()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise
        return fabric

    def join(self, environment: ClusterEnvironment, start: Callable[[], Sequence[Any]]) -> None:
        """Connect to the other ranks; ``start`` starts them and returns their processes."""
        address, timeout_s = local_address(environment.main_port), self.settings.timeout_s
        self.rank = environment.local_rank()
        if self.is_first:
            self.links = LeadingLinks(self.settings.num_ranks, address, timeout_s)
            self.links.wait_for_all(start())
        else:
            self.link = FollowingLink(self.rank, address, timeout_s)

    def begin_run(self, seed: int, state: TrainState) -> None:
        """The state of a run is complete, and the same on all ranks; only their random numbers must not be."""
        if self.several:
            state.gather()
        if not self.is_first:
            torch.manual_seed(fold(seed, "rank", self.rank, state.counters.step) % 2**63)

    def tell(self, *message: Any) -> None:
        """Send a message from rank 0 to all others."""
        if self.links is not None:
            self.links.tell(*message)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the run has failed here."""
        for link in (self.links, self.link):
            if link is not None:
                link.fail(error)

    def end_others(self) -> None:
        """Kill the ranks that this process has started: one of them hangs, and a wait for it ends with it."""
        if self.links is not None:
            self.links.kill()

    def cause(self) -> RuntimeError | None:
        """What became of another rank, if one was lost."""
        return None if self.links is None else self.links.cause()

    def close(self) -> None:
        """Part from the other ranks; on rank 0, when they have ended."""
        if not self._launched:
            return
        self._launched = False
        for link in (self.links, self.link):
            if link is not None:
                link.close()
        self.links = self.link = None
        if distributed.is_initialized() and self.settings.accelerator == "cpu":  # NCCL could wait for what will not come
            distributed.destroy_process_group()
        os.environ.pop("WORLD_SIZE", None)

    def leave(self) -> None:
        """End a process that was there to train: what the script does after that is rank 0's alone.

        Raises:
            SystemExit: on all ranks but 0.
        """
        if not self.is_first:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends as it is, and Python's way out takes a while
            raise SystemExit(0)

    # ------------------------------------------------------------------ what all ranks must agree on

    def merged(self, part: Meter) -> Meter:
        """What all ranks have counted since they last came here, the same on each."""
        if not self.several:
            return part
        counted = {name: (float(total), float(part.counts[name])) for name, total in part.sums.items()}
        together = Meter()
        with self.meeting():
            parts = self._strategy.meet("the end of a mini-batch", counted)
        for other in parts:
            together.add({name: (torch.tensor(total, dtype=torch.float64), n) for name, (total, n) in other.items()})
        return together

    def share_sums(self, objective: Objective) -> None:
        """Add up what the objectives of all ranks have seen in an update, so that all make the same of it."""
        if self.several:
            with self.meeting():
                parts = self._strategy.meet("the end of an update", objective.sums())
            objective.load_sums(_added(parts))


class _Launcher(_SubprocessScriptLauncher):
    """Fabric's launcher, which runs the command again for each rank; who is lost is noticed by the links."""

    def __init__(self, environment: ClusterEnvironment, num_ranks: int, ranks: Ranks) -> None:
        super().__init__(environment, num_ranks, num_nodes=1)
        self._ranks = ranks

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._ranks.join(self.cluster_environment, self._start)
        return function(*args, **kwargs)

    def _start(self) -> Sequence[Any]:
        if not self.cluster_environment.creates_processes_externally:
            main = sys.modules["__main__"]
            if getattr(main, "__file__", None) is None:
                raise RuntimeError("several ranks need a script or a command to run again; this session is interactive")
            self._call_children_scripts()
        return self.procs


def refuse_other_ranks(ranks: Ranks) -> None:
    """Refuse to do on another rank what one process does for all.

    Raises:
        RuntimeError: if this is not rank 0.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":
        how = f"trainer.num_ranks={ranks.settings.num_ranks}"
        raise RuntimeError(
            f"this is rank {rank}, but only fit and sft with trainer.num_ranks above 1 run on several ranks (here {how}); "
            "run what comes before them in a script of its own"
        )


def _added(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
