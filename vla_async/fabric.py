"""What a trainer sets up with Lightning Fabric: the device, the strategy, the loggers, and a policy's optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vla_async.envs.base import EnvFactory
from vla_async.ranks import Ranks
from vla_async.strategies import SizeWeightedSingleDeviceStrategy

Accelerator = Literal["auto", "cpu", "cuda"]
Precision = Literal["32-true", "bf16-mixed"]


def resolve_accelerator(wanted: Accelerator) -> Literal["cpu", "cuda"]:
    """What ``auto`` means on this machine.

    Raises:
        ValueError: if CUDA is asked for where there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator='cuda', but torch sees no CUDA device; use cpu or auto")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def training_device(accelerator: Literal["cpu", "cuda"], index: int) -> torch.device:
    """The device that trains."""
    return torch.device("cuda", index) if accelerator == "cuda" else torch.device("cpu")


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """The element type of matrix products where a policy acts in another process; None for that of its weights."""
    return torch.bfloat16 if precision == "bf16-mixed" else None


@contextmanager
def torch_threads(number: int | None, env: EnvFactory, num_ranks: int = 1) -> Iterator[None]:
    """Let torch compute with so many threads inside the block; None for those that the env workers leave, at least one.

    Of these, each rank of the host takes its part.

    Threads of one operation wait for each other; where the envs keep the cores busy, two of them are slower than one, by
    far.
    """
    before = torch.get_num_threads()
    workers = 1 if env.is_batched else env.num_envs
    torch.set_num_threads(number or max(1, (before - workers) // num_ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_fabric(
    accelerator: Literal["cpu", "cuda"],
    device: int,
    precision: Precision,
    directory: Path | None,
    loggers: Sequence[Logger],
    ranks: Ranks | None = None,
) -> Fabric:
    """Fabric on one device, or on several ranks, with ``metrics.csv`` in ``directory`` beside the given loggers.

    Args:
        accelerator: of all devices.
        device: index of the first device.
        precision: Fabric's.
        directory: of the run; None on a rank that writes nothing.
        loggers: in addition.
        ranks: that are to do something together.
    """
    if directory is not None:
        csv = CSVLogger(root_dir=directory, name="", version="", flush_logs_every_n_steps=1)
        _ = csv.experiment  # it warns of a directory that is not empty, so it opens before anything else is written there
        loggers = [csv, *loggers]
    if ranks is not None and ranks.several:
        return ranks.launch(precision, loggers)
    on = training_device(accelerator, device)
    strategy = SizeWeightedSingleDeviceStrategy(on)
    fabric = Fabric(accelerator=accelerator, devices=1, strategy=strategy, precision=precision, loggers=[*loggers])
    fabric.launch()
    return fabric


def unpack_optimizers(configured: Any) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer and the scheduler that a policy's ``configure_optimizers`` returned.

    Args:
        configured: an optimizer, or Lightning's dict of ``optimizer`` and ``lr_scheduler`` (a scheduler, or a dict that
            holds one as ``scheduler``). The scheduler is stepped with every optimizer step.

    Raises:
        ValueError: for anything else.
    """
    parts: dict[str, Any] = configured if isinstance(configured, dict) else {"optimizer": configured}
    optimizer, given = parts.get("optimizer"), parts.get("lr_scheduler")
    scheduling: dict[str, Any] = given if isinstance(given, dict) else {"scheduler": given}
    scheduler, interval = scheduling.get("scheduler"), scheduling.get("interval", "step")
    if isinstance(optimizer, Optimizer) and isinstance(scheduler, LRScheduler | None) and interval == "step":
        return optimizer, scheduler
    found = f"the optimizer {type(optimizer).__name__} and the scheduler {type(scheduler).__name__} by {interval}"
    raise ValueError(
        f"configure_optimizers gave {found}; return an optimizer, or {{'optimizer': ..., 'lr_scheduler': ...}} whose "
        "scheduler is stepped with every optimizer step (interval 'step')"
    )
