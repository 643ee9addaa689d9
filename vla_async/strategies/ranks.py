"""How the ranks of a size-weighted strategy come together: at set-up, and once per optimizer step at the division.

What they tell each other there goes over a process group of its own, on the CPU, whatever the devices: it knows its
time-out, and an error in it can be explained. Only the gradients go over the devices' own links.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn import Module

from vla_async.strategies.size_weighted import Report, SizeWeighted

DEFAULT_TIMEOUT_S = 1800.0


class AcrossRanks(SizeWeighted, ParallelStrategy):
    """The part of the accumulation that several ranks do together.

    Between two divisions no rank waits for another, so each may run any number of micro-batches. At the division each
    tells what it has; then the gradients are summed, and a rank without any takes part with zeros.
    """

    _timeout: timedelta | None

    def setup_environment(self) -> None:
        """Join the other ranks."""
        super().setup_environment()
        self._desk: Any = distributed.new_group(backend="gloo", timeout=self._timeout)
        self._store, self._meetings = _get_default_store(), 0

    def meet(self, occasion: str, message: Any) -> list[Any]:
        """What all ranks bring to an occasion, in their order; raises as the division does if one does not come to it."""
        return self._exchange(occasion, message)

    def _meet(self, report: Report) -> Sequence[Report]:
        reports = self._exchange("a division", report)
        for rank, other in enumerate(reports):
            if (other.optimizer, len(other.has_gradient)) != (report.optimizer, len(report.has_gradient)):
                raise RuntimeError(
                    f"rank {rank} steps optimizer {other.optimizer} of {len(other.has_gradient)} parameters while rank "
                    f"{self.global_rank} steps optimizer {report.optimizer} of {len(report.has_gradient)}; "
                    "all ranks must step the same optimizers in the same order"
                )
        return reports

    def _exchange(self, occasion: str, message: Any) -> list[Any]:
        """The messages of all ranks, in their order.

        Raises:
            RuntimeError: if they did not all come in time, or one came for something else; names those that did not.
        """
        self._meetings += 1
        self._store.set(self._mark("came", self.global_rank), str(self._meetings))
        messages: list[Any] = [None] * self.world_size
        try:
            distributed.all_gather_object(messages, (occasion, message), group=self._desk)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.global_rank} came to {occasion}, but {self._absent()} (timeout={self._timeout}): {error}"
            ) from error
        for rank, (other, _) in enumerate(messages):
            if other != occasion:
                raise RuntimeError(f"rank {self.global_rank} came to {occasion}, but rank {rank} to {other}")
        return [message for _, message in messages]

    def _sum(self, numbers: Tensor) -> Tensor:
        distributed.all_reduce(numbers, group=self._desk)
        return numbers

    def _mark(self, what: str, rank: int) -> str:
        """Where a rank notes in the store how many times it came, or that it asked who did not."""
        return f"{self._desk.group_name}/{what}/{rank}"

    def _absent(self) -> str:
        """Says who did not come to the meeting that broke."""
        everyone = range(self.world_size)
        try:
            came = [rank for rank in everyone if self._has_come(rank)]
            self._store.set(self._mark("asked", self.global_rank), "")
        except RuntimeError:
            return "rank 0 ended first, and with it the store in which it is noted who came"
        if self.global_rank == 0:  # the store may end with this rank, so let the others ask first
            with suppress(RuntimeError):
                self._store.wait([self._mark("asked", rank) for rank in came], timedelta(seconds=5))
        if len(came) == self.world_size:
            return "the connection broke, although all ranks had come"
        return f"rank {' and '.join(str(rank) for rank in everyone if rank not in came)} had not come"

    def _has_come(self, rank: int) -> bool:
        mark = self._mark("came", rank)
        return self._store.check([mark]) and int(self._store.get(mark)) >= self._meetings

    def _equalize(self, module: Module) -> None:
        """Give all ranks the parameters and buffers of rank 0, which they then keep equal by equal steps.

        Raises:
            RuntimeError: if the ranks have different modules.
        """
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        for rank, others in enumerate(self._exchange("a set-up", shapes)):
            if others != shapes:
                own, other = next(iter(set(shapes) - set(others)), None), next(iter(set(others) - set(shapes)), None)
                raise RuntimeError(f"rank {rank} has another module than rank {self.global_rank}: {other} for {own}")
        with torch.no_grad():
            for tensor in tensors.values():
                if not tensor.is_meta:
                    sent = tensor.detach().to(self.root_device).contiguous()
                    distributed.broadcast(sent, src=0)
                    tensor.copy_(sent)


def as_timedelta(timeout: float | timedelta) -> timedelta:
    """A time-out, which may be given in seconds.

    Raises:
        ValueError: if it is not positive.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout} must be positive; it is how long a rank waits for the others, in seconds")
    return timeout
