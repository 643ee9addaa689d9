"""What a trainer does with a policy before a run."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vla_async.envs.base import EnvSpec
from vla_async.fabric import unpack_optimizers
from vla_async.memory import check_weights_fit
from vla_async.policies.base import VLAPolicy


def set_up_policy(policy: VLAPolicy, spec: EnvSpec, device: torch.device) -> tuple[Optimizer, LRScheduler | None]:
    """Build a policy and its optimizer, as if there had been no run before.

    Args:
        policy: what is trained, or evaluated.
        spec: what its envs are like.
        device: where it is going to be sent to.

    Raises:
        MemoryError: if its weights alone are too many for the device.
    """
    policy.build(spec)
    if policy.objective is not None:
        policy.objective.reset()
    check_weights_fit(policy, device)
    policy.zero_grad()  # an earlier run may have been cut short between a backward and its step
    return unpack_optimizers(policy.configure_optimizers())
