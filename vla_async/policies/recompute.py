"""Gradient checkpointing of a single call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def call(function: Callable[..., Result], *arguments: object, recompute: bool) -> Result:
    """Call a function; with ``recompute``, keep none of its activations and compute them again for the gradient."""
    if recompute and torch.is_grad_enabled():
        result: Result = checkpoint(function, *arguments, use_reentrant=False)
        return result
    return function(*arguments)
