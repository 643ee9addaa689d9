"""The optimizer that policies with an actor and a critic share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def actor_critic_adamw(module: nn.Module, critic: str, options: Mapping[str, Any]) -> torch.optim.AdamW:
    """AdamW, with the actor and the critic in groups of their own and weight decay on matrices only.

    Frozen parameters are left out.

    Args:
        module: whose parameters are trained.
        critic: what the names of the critic's parameters start with.
        options: ``lr``, ``critic_lr`` (None for ``lr``), ``betas`` and ``weight_decay``.
    """
    critic_lr = options["lr"] if options["critic_lr"] is None else options["critic_lr"]
    groups: list[dict[str, Any]] = []
    for is_critic, lr in ((False, options["lr"]), (True, critic_lr)):
        named = [(name, p) for name, p in module.named_parameters() if name.startswith(critic) == is_critic]
        for decayed, decay in ((True, options["weight_decay"]), (False, 0.0)):
            params = [(name, p) for name, p in named if p.requires_grad and (p.ndim > 1) == decayed]
            if params:
                groups.append({"params": params, "lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=options["lr"], betas=tuple(options["betas"]))


def check_optimizer(check: Callable[[str, bool, str], None], options: Mapping[str, Any]) -> None:
    """Refuse options of :func:`actor_critic_adamw` that cannot work.

    Args:
        check: takes an option's name, whether it is valid, and what to say if not.
        options: ``lr``, ``critic_lr``, ``betas`` and ``weight_decay``.
    """
    for name in ("lr", "critic_lr"):
        check(name, options[name] is None or 0.0 <= options[name] < math.inf, "must not be negative")
    in_range = len(options["betas"]) == 2 and all(0.0 <= beta < 1.0 for beta in options["betas"])
    check("betas", in_range, "must be two numbers in [0, 1)")
    check("weight_decay", 0.0 <= options["weight_decay"] < math.inf, "must not be negative")
