"""The process that evaluates beside training: its own envs, its own copy of the policy, weights as they are handed to it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_async.collectors.worker import Reporting, leave_signals_to_parent
from vla_async.envs.base import EnvFactory
from vla_async.loops.evaluate import EvaluateLoop, EvaluationResult
from vla_async.policies.base import VLAPolicy
from vla_async.rng import fold
from vla_async.shared_memory import Field, SharedBlock


@dataclass(frozen=True)
class EvaluationOrders:
    """What the process is started with.

    Attributes:
        pickled: the policy and the :class:`EvaluateLoop`.
        factory: the envs.
        videos: directory for recordings.
        autocast: element type of the policy's matrix products, or None for that of its weights.
        seed: of torch's generators, for policies that draw from them.
        weights: the tensors of the policy's state_dict, written before each request.
        progress: int64 ``[1]``, how many episodes of the request have ended.
    """

    pickled: bytes
    factory: EnvFactory
    videos: Path
    autocast: torch.dtype | None
    seed: int
    weights: SharedBlock
    progress: SharedBlock


def fields_of(state_dict: Mapping[str, Any]) -> dict[str, Field]:
    """The tensors of a state_dict as fields of a block."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    return {name: Field(tuple(value.shape), value.dtype) for name, value in tensors.items()}


def run_evaluations(link: Connection, orders: EvaluationOrders) -> None:
    """Body of the process: build the envs, then answer each request with an :class:`EvaluationResult`.

    A request is the version of the weights in the block, and what else the state_dict holds; None ends the process.
    """
    leave_signals_to_parent()
    torch.set_num_threads(1)  # the other cores are for training and its envs
    torch.manual_seed(fold(orders.seed, "evaluation") % 2**63)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # nobody is left to tell
        with Reporting(link):
            policy, loop = pickle.loads(orders.pickled)
            policy.to(loop.device)
            loop.open(orders.factory)
        try:
            while (request := link.recv()) is not None:
                with Reporting(link):
                    result = _evaluate(policy, loop, orders, *request)
                link.send(result)
        finally:
            loop.close()


def _evaluate(
    policy: VLAPolicy, loop: EvaluateLoop, orders: EvaluationOrders, version: int, others: dict[str, Any]
) -> EvaluationResult:
    def tell(ended: int) -> None:
        orders.progress["ended"].fill_(ended)

    policy.load_state_dict({**orders.weights.tensors, **others})
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if orders.autocast is not None:
        autocast = partial(torch.autocast, loop.device.type, dtype=orders.autocast)
    return loop.run(
        policy,
        orders.factory,
        "validate",
        policy_version=version,
        videos=orders.videos,
        autocast=autocast,
        progress=tell,
    )
