"""Size-weighted accumulation: every backward adds a *sum*, and one division makes it a mean over all valid elements.

The protocol is two calls: ``fabric.backward(loss_sum, num_samples=valid)`` for each micro-batch, then
``optimizer.step()``, with ``fabric.clip_gradients`` between them if wanted. Micro-batches may be of any size and number,
and on several ranks each has its own number of them, also none: ranks meet only at the division.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_HOW = "call fabric.backward(loss_sum, num_samples=valid_count) for each micro-batch, then optimizer.step()"


_ZEROED = "this accumulation's gradients were zeroed; call strategy.reset() with optimizer.zero_grad()"
_STALE = (
    "there are gradients from before this accumulation: call optimizer.zero_grad() after each step, "
    "and never loss.backward()"
)


@dataclass(frozen=True)
class Report:
    """What a rank brings to a division.

    Attributes:
        optimizer: which of the optimizers, in the order of their set-up.
        accumulation: the last accumulation that the rank knows of; others may have begun another, which it has nothing for.
        count: valid elements behind the rank's gradient.
        loss: their summed loss.
        has_gradient: for each parameter of the optimizer, whether the rank has a gradient.
        problem: why the rank cannot take part, or None.
    """

    optimizer: int
    accumulation: int
    count: int
    loss: float
    has_gradient: tuple[bool, ...]
    problem: str | None


class SizeWeighted(Strategy):
    """The accumulation, for mixing into a strategy. One that has several ranks overrides the methods of the last section.

    Attributes:
        grad_norm: norm of the divided gradient before clipping, of the last normalised optimizer; NaN before the first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_norm = float("nan")
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # with their index
        self._numbers, self._accumulation = itertools.count(), 0
        self._guards: list[RemovableHandle] = []
        self._forget()

    def reset(self) -> None:
        """Forget what was accumulated, as after a step. Call it with ``optimizer.zero_grad()`` to give up on a step."""
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._loss: Tensor | float = 0.0
        self._involved: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that got gradients in it
        self._divided: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer into the protocol.

        Raises:
            ValueError: if the precision scales the loss (``16-mixed``): its infinities would read as a failure.
        """
        if getattr(self.precision, "scaler", None) is not None:
            raise ValueError("precision 16-mixed scales the loss, which size-weighted accumulation refuses; use bf16-mixed")
        optimizer = super().setup_optimizer(optimizer)
        self._optimizers[optimizer] = next(self._numbers)
        this, owner = weakref.ref(self), weakref.ref(optimizer)

        def guard(_: Tensor) -> None:
            # Lightning notices a raw loss.backward() only behind a wrapped forward, which a single device goes without
            strategy, involved = this(), owner()
            if strategy is None or involved is None:
                return
            if wrappers._in_fabric_backward:
                strategy._involved.add(involved)
            elif strategy._is_accumulating():
                raise RuntimeError(f"loss.backward() in the middle of an accumulation is not counted: {_HOW}")

        for leaf in self._leaves(optimizer):
            if leaf.requires_grad:
                self._guards.append(leaf.register_post_accumulate_grad_hook(guard))
        return optimizer

    def teardown(self) -> None:
        """Leave the parameters as they were before :meth:`setup_optimizer`, and release what Lightning holds."""
        for handle in self._guards:
            handle.remove()
        self._guards.clear()
        self._optimizers.clear()
        self.reset()
        super().teardown()

    def _is_accumulating(self) -> bool:
        """Whether some optimizer that got gradients has still to step."""
        return self._count > 0 and (not self._involved or any(owner not in self._stepped for owner in self._involved))

    def backward(
        self, tensor: Tensor, module: Module | None = None, *args: Any, num_samples: int | None = None, **kwargs: Any
    ) -> None:
        """Back-propagate the summed loss of one micro-batch.

        Args:
            tensor: scalar, the sum of the loss over the valid elements.
            module: handed on to Lightning.
            args: handed on to torch.
            num_samples: number of valid elements; 0 is allowed.
            kwargs: handed on to torch.

        Raises:
            ValueError: without ``num_samples``, or with a negative one.
            RuntimeError: if the gradients were divided, zeroed or written by someone else since the last backward.
        """
        if num_samples is None:
            raise ValueError(f"fabric.backward got no num_samples, so its loss cannot be weighted: {_HOW}")
        if num_samples < 0:
            raise ValueError(f"num_samples={num_samples} must not be negative")
        if self._stepped:
            self._begin()
        self._check_gradients()
        super().backward(tensor, module, *args, **kwargs)
        self._count += num_samples
        self._loss = self._loss + tensor.detach()

    def _begin(self) -> None:
        self._forget()
        self._accumulation += 1

    def _check_gradients(self) -> None:
        """Gradients must be what this accumulation left: none before its first backward, some after it."""
        if self._divided:
            raise RuntimeError("a backward after the gradients were divided (by clipping) and before optimizer.step()")
        if self._count > 0 and self._optimizers and all(_has_none(optimizer) for optimizer in self._optimizers):
            raise RuntimeError(_ZEROED)
        if self._count == 0 and any(self._has_some(optimizer) for optimizer in self._optimizers):
            raise RuntimeError(_STALE)

    def _has_some(self, optimizer: Optimizer) -> bool:
        """Whether there is a gradient other than zeros for an optimizer, as far as this rank sees."""
        gradients = [*_gradients(optimizer), *(leaf.grad for leaf in self._leaves(optimizer) if leaf.grad is not None)]
        return any(bool(local(gradient).any()) for gradient in gradients)

    def normalize(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the valid count of all ranks, once; clipping and the step call it.

        On several ranks, all of them come to it, each with what it has.

        Raises:
            RuntimeError: if no rank accumulated a valid element since the last step, if some rank's gradients are not what
                its accumulation left, or if some rank does not come.
            FloatingPointError: if the gradient is not finite.
        """
        idle = optimizer in self._stepped
        if idle:
            self._begin()  # an accumulation without a backward, which other ranks may have had
        if optimizer in self._divided:
            return
        reports = self._meet(self._report(optimizer))
        latest = max(report.accumulation for report in reports)
        total = sum(report.count for report in reports if report.accumulation == latest)
        if total == 0:
            what = "without a backward since the last one" if idle else "with no valid loss element"
            raise RuntimeError(f"optimizer.step() {what} (raw loss.backward() is not counted): {_HOW}")
        for rank, report in enumerate(reports):
            late = _STALE if any(report.has_gradient) else None
            if problem := report.problem if report.accumulation == latest else late:
                raise RuntimeError(f"{problem} (on rank {rank} of {len(reports)})")
        if self._accumulation < latest:
            self._forget()
            self._accumulation = latest
        # what has no gradient anywhere keeps none, so that the optimizer leaves it alone, as on one device
        self._reduce(optimizer, [any(flags) for flags in zip(*(r.has_gradient for r in reports), strict=True)])
        for gradient in _gradients(optimizer):
            gradient.div_(total)
        self._divided.add(optimizer)
        self._check_finite(optimizer, sum(report.loss for report in reports if report.accumulation == latest) / total)

    def _report(self, optimizer: Optimizer) -> Report:
        problem = None
        if optimizer in self._involved and _has_none(optimizer):
            problem = _ZEROED
        elif self._count == 0 and self._has_some(optimizer):
            problem = _STALE
        has_gradient = tuple(leaf.grad is not None for leaf in self._leaves(optimizer))
        number = self._optimizers[optimizer]
        return Report(number, self._accumulation, self._count, float(self._loss), has_gradient, problem)

    def _check_finite(self, optimizer: Optimizer, mean_loss: float) -> None:
        norm = torch.nn.utils.get_total_norm(list(_gradients(optimizer)))
        self.grad_norm = float(whole(norm))
        if math.isfinite(self.grad_norm):
            return
        named = [(name, p.grad) for name, p in _named(optimizer) if p.grad is not None]
        bad = self._sum(torch.tensor([int(not local(gradient).isfinite().all()) for _, gradient in named]))
        names = [name for (name, _), flag in zip(named, bad.tolist(), strict=True) if flag]
        raise FloatingPointError(
            f"the gradient is not finite (norm {self.grad_norm}) at a mean loss of {mean_loss}; "
            f"first in {names[0] if names else 'the norm, which overflowed'}"
        )

    def clip_gradients_norm(self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Divide, then clip by norm."""
        self.normalize(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Divide, then clip by value."""
        self.normalize(optimizer)
        super().clip_gradients_value(module, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Divide if that is still to do, then step.

        Raises:
            ValueError: for a closure, which would run backward passes after the division.
        """
        if kwargs.get("closure") is not None:
            raise ValueError(f"optimizer.step(closure) cannot be size-weighted: {_HOW}")
        self.normalize(optimizer)
        result = super().optimizer_step(optimizer, **kwargs)
        self._stepped.add(optimizer)
        return result

    # ------------------------------------------------------------------ what differs on several ranks

    def meet(self, occasion: str, message: Any) -> list[Any]:
        """What all ranks bring to an occasion, in their order. All must come to it."""
        return [message]

    def _leaves(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """The tensors that the backward pass writes the gradients of an optimizer's parameters into."""
        return list(parameters_of(optimizer))

    def _meet(self, report: Report) -> Sequence[Report]:
        """The reports of all ranks, in their order."""
        return [report]

    def _reduce(self, optimizer: Optimizer, wanted: Sequence[bool]) -> None:
        """Sum the gradients of the wanted parameters over the ranks."""

    def _sum(self, numbers: Tensor) -> Tensor:
        """Sum numbers, on the CPU, over the ranks."""
        return numbers


def local(tensor: Tensor) -> Tensor:
    """What a rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, for which its ranks must come together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p.grad for p in parameters_of(optimizer) if p.grad is not None)


def _has_none(optimizer: Optimizer) -> bool:
    return next(_gradients(optimizer), None) is None


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters with their names, if the optimizer was given them; else with their place in it."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{index}][{place}]" for place in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)
