"""Rollouts: env workers, replicas, and the collectors that drive them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_async.collectors.batcher import DynamicBatcher, Share
    from vla_async.collectors.streaming import StreamingCollector

__all__ = ["DynamicBatcher", "Share", "StreamingCollector"]


_MODULES = {"DynamicBatcher": "batcher", "Share": "batcher", "StreamingCollector": "streaming"}


def __getattr__(name: str) -> Any:
    # on demand, because a worker that steps an env has no use for what drives it
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
