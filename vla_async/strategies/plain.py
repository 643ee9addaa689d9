"""A sharded module as other processes can have it."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter


def plain_copy(module: Module) -> Module:
    """A module as it was before FSDP2 sharded it, with the weights that it has between two steps, which it shares.

    A module without anything sharded in it is returned as it is.
    """
    return _plain(module, {}) if any(isinstance(part, FSDPModule) for part in module.modules()) else module


def _plain(module: Module, known: dict[int, Module]) -> Module:
    if id(module) in known:
        return known[id(module)]
    is_part = isinstance(module, FSDPModule)
    kind: Any = type(module).__bases__[1] if is_part else type(module)
    plain: Module = kind.__new__(kind)
    plain.__dict__ = {n: v for n, v in module.__dict__.items() if not n.startswith("__composable_api")}  # fully_shard's
    known[id(module)] = plain
    if is_part:  # it has put its own hooks there
        plain.__dict__.update({name: type(value)() for name, value in plain.__dict__.items() if name.endswith("_hooks")})
    own = module._parameters.items()
    plain._parameters = {name: None if p is None else Parameter(p.detach(), p.requires_grad) for name, p in own}
    plain._modules = {name: None if part is None else _plain(part, known) for name, part in module._modules.items()}
    return plain
