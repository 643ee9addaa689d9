"""Size-weighted accumulation on several ranks, each with the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import distributed
from torch.nn import Module
from torch.optim import Optimizer

from vla_async.strategies.ranks import DEFAULT_TIMEOUT_S, AcrossRanks, as_timedelta
from vla_async.strategies.size_weighted import parameters_of


class SizeWeightedDDPStrategy(AcrossRanks, DDPStrategy):
    """Data parallel: each rank has the whole model. The gradient is the mean over all valid loss elements of all ranks.

    The gradients are summed once, at the division. torch's ``DistributedDataParallel`` would rather sum them during a
    backward pass, all ranks in the same one; as no rank knows which of its backward passes is its last, and may have none,
    the module is not wrapped in it. It stays as it is on one device: any method of it can be called without being marked,
    buffers are each rank's own after the set-up, and parameters may go without a gradient in any step, on any rank.

    Args:
        timeout: how long a rank waits for the others at the division, in seconds or as a timedelta.
        process_group_backend: as in Lightning.
        start_method: as in Lightning.
        options: handed on to Lightning's strategy: accelerator, parallel_devices, cluster_environment and the like.
    """

    def __init__(
        self,
        timeout: float | timedelta = DEFAULT_TIMEOUT_S,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            timeout=as_timedelta(timeout),
            process_group_backend=process_group_backend,
            start_method=start_method,
            **options,
        )
        if self._ddp_kwargs:
            raise TypeError(f"{type(self).__name__} has no {', '.join(self._ddp_kwargs)}: it does not use torch's DDP")
        self._backward_sync_control = None  # nothing is synchronised in a backward pass

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Start all ranks from the weights of rank 0."""
        self._equalize(module)
        return module

    def _reduce(self, optimizer: Optimizer, wanted: Sequence[bool]) -> None:
        works = []
        for parameter, is_wanted in zip(parameters_of(optimizer), wanted, strict=True):
            if is_wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(distributed.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()
