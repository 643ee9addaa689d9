"""``EmulatedPolicy``: holds an emulated device for as long as a real forward would, and gives a known action."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.emulation.device import DeviceLock, sleep_until


class EmulatedPolicy(TensorDictModuleBase):
    """A policy whose forward takes ``flat_s + per_row_s * rows`` seconds of its device, which serves one copy at a time.

    The action is ``sin(scale * sum(observation) + bias)``: each row's own, whatever else is in its batch.

    Args:
        action_shape: shape of one row's action, ``(H, A)`` for a chunk.
        flat_s: seconds per forward.
        per_row_s: seconds per row of a forward.
        observation_key: what is read, ``[*B, n]``.
        action_key: what is written, ``[*B, *action_shape]``.
        payload_mb: size of a parameter that nothing uses, in MB of 10^6 bytes, for measuring what publishing weights costs.
        device_lock: the device; by default one of its own, which copies of the policy share.

    Raises:
        ValueError: for a cost, a shape or a payload that is negative, empty or not finite.
    """

    def __init__(
        self,
        action_shape: Sequence[int],
        *,
        flat_s: float = 0.0,
        per_row_s: float = 0.0,
        observation_key: NestedKey = keys.STATE,
        action_key: NestedKey = keys.CHUNK,
        payload_mb: float = 0.0,
        device_lock: DeviceLock | None = None,
    ) -> None:
        for name, value in {"flat_s": flat_s, "per_row_s": per_row_s, "payload_mb": payload_mb}.items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"EmulatedPolicy.{name}={value} must be 0 or positive")
        if not action_shape or min(action_shape) < 1:
            raise ValueError(f"EmulatedPolicy.action_shape={tuple(action_shape)} must be sizes of at least 1, like (H, A)")
        super().__init__()
        self.in_keys, self.out_keys = [observation_key], [action_key]
        self.flat_s, self.per_row_s = flat_s, per_row_s
        self._action_shape = tuple(action_shape)
        size = math.prod(action_shape)
        self.scale = nn.Parameter(torch.linspace(0.1, 1.0, size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.payload = nn.Parameter(torch.ones(int(payload_mb * 1e6) // 4)) if payload_mb else None
        self._device = (device_lock or DeviceLock()) if flat_s or per_row_s else nullcontext()

    def action(self, observation: Tensor) -> Tensor:
        """The action ``[*B, *action_shape]`` for an observation ``[*B, n]``."""
        total = observation.to(self.scale.dtype).sum(-1, keepdim=True)
        return torch.sin(total * self.scale + self.bias).reshape(*observation.shape[:-1], *self._action_shape)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action into ``tensordict``, of any batch size."""
        with self._device:
            deadline = time.perf_counter() + self.flat_s + self.per_row_s * tensordict.numel()
            tensordict.set(self.out_keys[0], self.action(tensordict.get(self.in_keys[0])))
            sleep_until(deadline)
        return tensordict
