"""Size-weighted accumulation: every backward adds a *sum*, and one division makes it a mean over all valid elements.

The protocol is two calls: ``fabric.backward(loss_sum, num_samples=valid)`` for each micro-batch, then
``optimizer.step()``, with ``fabric.clip_gradients`` between them if wanted. Micro-batches may be of any size and number.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_HOW = "call fabric.backward(loss_sum, num_samples=valid_count) for each micro-batch, then optimizer.step()"


class _SizeWeighted(Strategy):
    """The accumulation, for mixing into a strategy. What differs between strategies is :meth:`_total` alone.

    Attributes:
        grad_norm: norm of the divided gradient before clipping, of the last normalised optimizer; NaN before the first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_norm = float("nan")
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guards: list[RemovableHandle] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was accumulated, as after a step. Call it with ``optimizer.zero_grad()`` to give up on a step."""
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
        self._optimizers.add(optimizer)
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

        for parameter in _parameters(optimizer):
            if parameter.requires_grad:
                self._guards.append(parameter.register_post_accumulate_grad_hook(guard))
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
            self.reset()
        self._check_gradients()
        super().backward(tensor, module, *args, **kwargs)
        self._count += num_samples
        self._loss = self._loss + tensor.detach()

    def _check_gradients(self) -> None:
        """Gradients must be what this accumulation left: none before its first backward, some after it."""
        if self._divided:
            raise RuntimeError("a backward after the gradients were divided (by clipping) and before optimizer.step()")
        gradients = [p.grad for optimizer in self._optimizers for p in _parameters(optimizer) if p.grad is not None]
        if self._count > 0 and self._optimizers and not gradients:
            raise RuntimeError("this accumulation's gradients were zeroed; call strategy.reset() with optimizer.zero_grad()")
        if self._count == 0 and any(bool(gradient.any()) for gradient in gradients):
            raise RuntimeError(
                "there are gradients from before this accumulation: call optimizer.zero_grad() after each step, "
                "and never loss.backward()"
            )

    def _total(self) -> int:
        """Valid elements behind the accumulated gradient."""
        return self._count

    def normalize(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the valid count, once; clipping and the step call it.

        Raises:
            RuntimeError: if nothing was accumulated since the last step, or no element was valid.
            FloatingPointError: if the gradient is not finite.
        """
        if optimizer in self._stepped:
            raise RuntimeError(f"optimizer.step() without a backward since the last one: {_HOW}")
        if optimizer in self._divided:
            return
        total = self._total()
        if total == 0:
            raise RuntimeError(f"optimizer.step() with no valid loss element (raw loss.backward() is not counted): {_HOW}")
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        for gradient in gradients:
            gradient.div_(total)
        self._divided.add(optimizer)
        self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(self.grad_norm):
            names = [name for name, p in _named(optimizer) if p.grad is not None and not p.grad.isfinite().all()]
            raise FloatingPointError(
                f"the gradient is not finite (norm {self.grad_norm}) at a mean loss of {float(self._loss) / total}; "
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


class SizeWeightedSingleDeviceStrategy(_SizeWeighted, SingleDeviceStrategy):
    """One device. The gradient is the mean over all valid loss elements of a step, however they were split.

    Args:
        device: the device.
        accelerator: as in Lightning.
        checkpoint_io: as in Lightning.
        precision: as in Lightning.
    """


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters with their names, if the optimizer was given them; else with their place in it."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{index}][{place}]" for place in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)
