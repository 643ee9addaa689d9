"""What a replica says when a policy fails, or computes what is not finite: which envs it was for, and what it saw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_async import keys
from vla_async.collectors.board import Board
from vla_async.collectors.slab import Key, Leaf, Slab, read_texts

# What a trainer computes with, by the last part of its key, ours and TorchRL's. Elsewhere an infinity means something:
# masked logits, the log-prob of what cannot be done.
_MUST_BE_FINITE = frozenset(
    {"action", keys.CHUNK[-1], keys.LOG_PROB, "log_prob", "sample_log_prob", keys.VALUE, "state_action_value"}
)


class Complaint:
    """Describes rows of a slab.

    Args:
        slab: where the rows are.
        board: shared bookkeeping.
        reads: what the policy sees.
    """

    def __init__(self, slab: Slab, board: Board, reads: Sequence[Leaf]) -> None:
        self.slab, self.board, self.reads = slab, board, reads

    def check_finite(self, made: Mapping[Key, Tensor], rows: NDArray[np.int64], version: int) -> None:
        """Refuse a NaN in anything, and an infinity in an action, its log-prob or a value.

        Raises:
            FloatingPointError: names it, the envs and the input.
        """
        for key, value in made.items():
            if not value.is_floating_point() or math.isfinite(_sum_of_squares(value)):
                continue  # it is finite if all are, unless it overflows
            is_bad = ~torch.isfinite(value) if key[-1] in _MUST_BE_FINITE else torch.isnan(value)
            wrong = rows[is_bad.reshape(len(value), -1).any(-1).numpy()]
            if len(wrong):
                raise FloatingPointError(f"the policy's {'.'.join(key)} is not finite; {self.about(wrong, version)}")

    def about(self, rows: NDArray[np.int64], version: int) -> str:
        """Which envs some rows belong to, which weights decided, and what the policy saw there."""
        slots = np.unique(rows // self.slab.layout.rows_per_slot)
        envs = np.flatnonzero(np.isin(self.board.slot, slots)).tolist()
        seen = [_summary(leaf, self.slab.rows(leaf.key)[torch.from_numpy(rows)]) for leaf in self.reads]
        return f"it was for env {envs}, with weights of version {version}; the input was {'; '.join(seen)}"


def _sum_of_squares(value: Tensor) -> float:
    flat = value.reshape(-1)
    if value.dtype not in (torch.float32, torch.float64):
        return float(flat.dot(flat))
    array = flat.numpy()  # NumPy's product touches half the code that torch's does
    return float(np.dot(array, array))


def _summary(leaf: Leaf, value: Tensor) -> str:
    name, dtype = ".".join(leaf.key), str(leaf.dtype).removeprefix("torch.")
    if leaf.is_text:
        return f"{name} {read_texts(value, value.shape[:1]).tolist()[:3]}"
    numbers = value.double()
    span = f"in [{numbers.min():g}, {numbers.max():g}]" if bool(torch.isfinite(numbers).all()) else "not finite"
    return f"{name} {dtype} {list(value.shape)} {span}"
