"""``Tally``: what replicas count, in shared memory, and what is made of it: shares, means and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_async.monitor import metric_table as names
from vla_async.shared_memory import Field, SharedBlock, numbers

_RATIO = 1.05  # of neighbouring bins, so a percentile of times is known to 5 %
_LOG_RATIO = math.log(_RATIO)
_SHORTEST_S = 1e-6
_BINS = 460  # up to 5,000 s


class Tally:
    """Counts of one replica. Sent to another process, it is the same memory there.

    Attributes:
        sizes: int64 ``[Bmax + 1]``, batches by their number of rows.
        waits: int64 ``[bins]``, decisions by how long they waited for their batch.
        forwards: int64 ``[bins]``, batches by how long they took.
        seconds: float64 ``[2]``: busy, and since the replica began to serve.
        queue: int64 ``[2]``: rows found waiting, summed over all looks, and the number of looks.

    Args:
        max_batch_size: Bmax.
    """

    def __init__(self, max_batch_size: int) -> None:
        counts = {"sizes": max_batch_size + 1, "waits": _BINS, "forwards": _BINS, "queue": 2}
        fields = {name: Field((size,), torch.int64) for name, size in counts.items()}
        self._attach(SharedBlock(fields | {"seconds": Field((2,), torch.float64)}))

    def _attach(self, block: SharedBlock) -> None:
        self._block = block
        self.sizes: NDArray[Any]
        self.waits: NDArray[Any]
        self.forwards: NDArray[Any]
        self.seconds: NDArray[Any]
        self.queue: NDArray[Any]
        for name, tensor in block.tensors.items():
            setattr(self, name, tensor.numpy())
        self._sizes, self._waits, self._forwards = map(numbers, (self.sizes, self.waits, self.forwards))
        self._seconds, self._queue = map(numbers, (self.seconds, self.queue))

    def __getstate__(self) -> SharedBlock:
        return self._block

    def __setstate__(self, state: SharedBlock) -> None:
        self._attach(state)

    def add(self, rows: int, waits: Sequence[float], taken_s: float, waiting: int) -> None:
        """Count a batch: its rows, how long each request had waited, how long it took, the rows that stayed behind."""
        self._sizes[rows] += 1
        self._forwards[time_bin(taken_s)] += 1
        for wait in waits:
            self._waits[time_bin(wait)] += 1
        self._seconds[0] += taken_s
        self._queue[0] += waiting
        self._queue[1] += 1

    def at(self, seconds: float) -> None:
        """Note how long the replica has served."""
        self._seconds[1] = seconds


def time_bin(seconds: float) -> int:
    """The bin of a time."""
    if seconds <= _SHORTEST_S:
        return 0
    return min(_BINS - 1, 1 + int(math.log(seconds / _SHORTEST_S) / _LOG_RATIO))


def percentile(counts: NDArray[Any], share: float) -> float:
    """The time in seconds that a share (in [0, 1]) of what was counted does not exceed; NaN if nothing was."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    index = int(np.searchsorted(np.cumsum(counts), share * total))
    return float(_SHORTEST_S * _RATIO ** (index - 0.5)) if index else _SHORTEST_S


@dataclass(frozen=True)
class Totals:
    """What several replicas have counted in all, or from one moment to another: see :class:`Tally` for its fields.

    The times in ``seconds`` are sums over the replicas; ``sizes`` is as long as that of the largest of them.
    """

    sizes: NDArray[Any]
    waits: NDArray[Any]
    forwards: NDArray[Any]
    seconds: NDArray[Any]
    queue: NDArray[Any]

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Totals:
        """Add up copies of what replicas have counted so far."""
        longest = max(len(tally.sizes) for tally in tallies)
        sizes = np.sum([np.pad(tally.sizes, (0, longest - len(tally.sizes))) for tally in tallies], axis=0)
        rest = [[tally.waits, tally.forwards, tally.seconds, tally.queue] for tally in tallies]
        return cls(sizes, *(np.sum(parts, axis=0) for parts in zip(*rest, strict=True)))

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(*(now - before for now, before in zip(vars(self).values(), vars(earlier).values(), strict=True)))

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return int((self.sizes * np.arange(len(self.sizes))).sum())

    def metrics(self) -> dict[str, float]:
        """The mean size of batches, and percentiles of times; NaN where nothing was counted."""
        batches = int(self.sizes[1:].sum())  # one whose rows all stand still makes no forward pass
        waits = zip((names.REQUEST_WAIT_P50, names.REQUEST_WAIT_P95, names.REQUEST_WAIT_P99), (0.5, 0.95, 0.99), strict=True)
        forwards = zip((names.FORWARD_P50, names.FORWARD_P95), (0.5, 0.95), strict=True)
        return {
            names.BATCH_MEAN: self.rows / batches if batches else math.nan,
            **{name: percentile(self.waits, share) for name, share in waits},
            **{name: percentile(self.forwards, share) for name, share in forwards},
        }

    def shares(self) -> dict[str, float]:
        """The share of batches of at most n rows and more than n / 2, for n = 1, 2, 4, ... up to Bmax; and Bmax."""
        batches, limit, n = int(self.sizes[1:].sum()), len(self.sizes) - 1, 1
        shares = dict[str, float]()
        while n < 2 * limit:
            counted = int(self.sizes[n // 2 + 1 : n + 1].sum())
            shares[names.BATCH_SHARE.of(n)] = counted / batches if batches else math.nan
            n *= 2
        return shares | {names.BATCH_LIMIT: float(limit)}


def summary(tallies: Sequence[Tally]) -> dict[str, Any]:
    """What replicas have done so far.

    Returns:
        ``batch_size/histogram`` (a list), ``batch_size/mean``, ``request_wait_s/p50`` and p95 and p99, ``forward_s/p50`` and
        ``forward_s/p95``, ``queue/mean_rows``, ``replica/idle_share``, ``decisions``.
    """
    totals = Totals.of(tallies)
    busy, alive = totals.seconds.tolist()
    queued, looks = totals.queue.tolist()
    return {
        names.BATCH_HISTOGRAM: totals.sizes.tolist(),
        **totals.metrics(),
        names.MEAN_QUEUED_ROWS: queued / looks if looks else math.nan,
        names.REPLICA_IDLE: 1.0 - busy / alive if alive else math.nan,
        names.DECISIONS: totals.rows,
    }
