"""Random streams that belong to an env or a request, not to a process.

A decision's noise is a pure function of an integer key, so it does not depend on which other requests shared its batch,
on the replica that answered, or on timing. The generator is the SplitMix64 finaliser (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014, section 4) used as a counter-based hash.

Episode seeds live in three disjoint ranges, so no evaluation episode can ever have been trained on.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

Split = Literal["train", "validate", "test"]
_F = TypeVar("_F", bound=Callable[..., Any])

TRAIN_SEEDS = 2**30  # training seeds are [0, TRAIN_SEEDS)
EVALUATION_OFFSETS: dict[str, int] = {"validate": 2**30, "test": 2**30 + 2**29}
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit ``value``."""
    return value - (1 << 64) if value >= (1 << 63) else value


def fold(*parts: int | str) -> int:
    """Hash integers and strings into one 64-bit key (as a signed int64).

    Args:
        parts: what the key is made of, for example ``fold(seed, "policy", env_index, decision)``.
    """
    state = 0
    for part in parts:
        word = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = (state ^ (word & _MASK)) + _GOLDEN & _MASK
        state = (state ^ (state >> 30)) * _MIX_1 & _MASK
        state = (state ^ (state >> 27)) * _MIX_2 & _MASK
        state ^= state >> 31
    return _signed(state)


def episode_seed(seed: int, env_index: int, episode: int) -> int:
    """Seed of one training episode: the ``episode``-th of env ``env_index``, in ``[0, 2**30)``."""
    return fold(seed, "episode", env_index, episode) % TRAIN_SEEDS


def evaluation_seed(split: Split, episode: int) -> int:
    """Seed of the ``episode``-th evaluation episode: consecutive, and outside the training range.

    Raises:
        ValueError: for a split that is not ``validate`` or ``test``.
    """
    if split not in EVALUATION_OFFSETS:
        raise ValueError(f"split={split!r} has no evaluation seeds; use one of {sorted(EVALUATION_OFFSETS)}")
    return EVALUATION_OFFSETS[split] + episode


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _logical_shift(x, 27)) * _signed(_MIX_2)
    return x ^ _logical_shift(x, 31)


def _uncompiled(function: _F) -> _F:
    """Inductor takes the counters for an index into memory, whose products may not overflow."""
    return cast(_F, torch.compiler.disable(function))


@_uncompiled
def uniform(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Uniform numbers in (0, 1), one independent block per key.

    Args:
        keys: int64 ``[*B]``.
        shape: shape of the block that each key gets.
        stream: tells apart several draws made with one key.

    Returns:
        float32 ``[*B, *shape]`` on the keys' device; row ``b`` depends on ``keys[b]`` alone.
    """
    count = math.prod(shape)
    counters = torch.arange(1, count + 1, device=keys.device) + (stream << 32)
    bits = _hash(_hash(keys.unsqueeze(-1)) + counters * _signed(_GOLDEN))
    # 23 bits and a half fit a float32 exactly, so the result is never 0 or 1
    return ((_logical_shift(bits, 41).to(torch.float32) + 0.5) * 2.0**-23).reshape(*keys.shape, *shape)


@_uncompiled
def normal(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Standard normal numbers (Box-Muller), one independent block per key; arguments as in :func:`uniform`."""
    pair = uniform(keys, 2, *shape, stream=stream)
    radius, angle = pair.select(keys.ndim, 0), pair.select(keys.ndim, 1)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)
