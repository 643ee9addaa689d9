"""What one decision of a policy takes, measured."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.policies.base import VLAPolicy


def total_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors among some values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class Decision:
    """Bytes of one decision.

    Attributes:
        seen: what the policy sees.
        made: what it decides, with what it stores for training.
        kept: what the backward pass keeps of it.
    """

    seen: int
    made: int
    kept: int


def measure_decision(
    policy: VLAPolicy, device: torch.device, autocast: AbstractContextManager[Any], imitate: bool
) -> Decision:
    """Let a built policy decide on zeros, and train on it, to see what that takes; it is left as it was.

    Args:
        policy: is on ``device``.
        device: of the trainer.
        autocast: of the trainer.
        imitate: whether it will imitate rather than be reinforced.
    """
    td, buffers = blank_observations(policy, 1, device), {name: buffer.clone() for name, buffer in policy.named_buffers()}
    seen, was_training = total_bytes(td.values(True, True)), policy.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast:
        with torch.no_grad():
            made = policy.eval().act(td)
        made[keys.ACTION_IS_PAD] = torch.zeros(made[keys.CHUNK].shape[:-1], dtype=torch.bool, device=device)
        policy.train()
        kept: dict[int, torch.UntypedStorage] = {}  # held, for the place of one that is freed would be another's
        known = {tensor.untyped_storage().data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result: Any = policy.imitation_step(made) if imitate else policy.evaluate(made)
        del result
    policy.train(was_training)
    with torch.no_grad():
        for name, buffer in buffers.items():
            policy.get_buffer(name).copy_(buffer)
    return Decision(seen, total_bytes(made.values(True, True)) - seen, sum(storage.nbytes() for storage in kept.values()))


def blank_observations(policy: VLAPolicy, rows: int, device: torch.device) -> TensorDictBase:
    """What a built policy decides on, all of it zero: a TensorDict ``[rows]``."""
    spec = policy.env_spec
    if spec is None:
        raise RuntimeError("the policy has no modules yet; call build(env.env_spec) first")
    td = TensorDict({}, batch_size=[rows], device=device)
    for name, shape in spec.images.items():
        td[keys.OBSERVATION, name] = torch.zeros(rows, *shape, dtype=torch.uint8)
    if spec.state_dim is not None:
        td[keys.STATE] = torch.zeros(rows, spec.state_dim)
    td[keys.INSTRUCTION_TOKENS] = policy.tokenize("pick it up").repeat(rows, 1)
    td[keys.REQUEST_KEY] = torch.zeros(rows, 1, dtype=torch.int64)
    return td
