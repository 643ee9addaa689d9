"""Asynchronous reinforcement-learning post-training of Vision-Language-Action policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_async.placement import Placement
    from vla_async.trainer import AsyncTrainer

__version__ = "0.1.0"
__all__ = ["AsyncTrainer", "Placement", "__version__"]

_HOMES = {"AsyncTrainer": "vla_async.trainer", "Placement": "vla_async.placement"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: ``import vla_async`` alone takes no time."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
