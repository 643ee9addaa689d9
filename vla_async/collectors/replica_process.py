"""The process of an :class:`InferenceReplica`."""

from __future__ import annotations

import contextlib
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torchrl.envs.utils import set_exploration_type

from vla_async.collectors.acting import ActingPolicy
from vla_async.collectors.orders import ReplicaOrders, ReplicaReady, ReplicaSettings
from vla_async.collectors.replica import InferenceReplica
from vla_async.collectors.wires import Wires
from vla_async.collectors.worker import Reporting, leave_signals_to_parent
from vla_async.policies.base import VLAPolicy
from vla_async.rng import fold


def run_replica(link: Connection, number: int, settings: ReplicaSettings, wires: Wires) -> None:
    """Body of the process: get the policy and the leaves, say what it writes, then serve until told to stop."""
    leave_signals_to_parent()
    torch.set_num_threads(settings.num_threads)
    torch.manual_seed(fold(settings.seed, "replica", number) % 2**63)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # nobody is left to tell
        pickled, leaves = link.recv()
        with Reporting(link), set_exploration_type(settings.exploration_type):
            policy = pickle.loads(pickled)
            if settings.compile_policy and isinstance(policy, nn.Module):
                compile_acting(policy, mode="reduce-overhead" if settings.device.type == "cuda" else None)
            device, sizes = settings.device, settings.batch_sizes
            acting = ActingPolicy(policy, leaves, device=device, autocast=settings.autocast, batch_sizes=sizes)
            link.send(ReplicaReady(acting.writes, acting.has_value))
        orders: ReplicaOrders = link.recv()
        with Reporting(link), set_exploration_type(settings.exploration_type), torch.no_grad():
            InferenceReplica(number, acting, settings, orders, wires).run()


def compile_acting(policy: nn.Module, **options: Any) -> None:
    """Compile what a policy decides with: ``act``, or its forward pass if it is no policy of ours.

    Args:
        policy: changed in place.
        **options: of ``torch.compile``.
    """
    if isinstance(policy, VLAPolicy):
        policy.act = torch.compile(policy.act, **options)  # type: ignore[method-assign]
    else:
        policy.compile(**options)
