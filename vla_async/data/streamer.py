"""``Streamer``: hands micro-batches to training as trajectories finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from vla_async import keys


@dataclass(frozen=True)
class MicroBatch:
    """Decisions that go through one forward and backward pass.

    Attributes:
        data: TensorDict ``[B]``.
        ends_mini_batch: whether it fills a mini-batch, so that an optimizer step follows. The last one of an update, which
            nothing follows, does not say so.
    """

    data: TensorDictBase
    ends_mini_batch: bool


class Streamer:
    """Cuts trajectories into micro-batches in the order in which they finish.

    A micro-batch is handed over as soon as it is full; the last one of an update may be short. What fills it does not
    depend on how long the next trajectory takes.

    Args:
        arrivals: yields the trajectories of one update, prepared, each ``[N, T]``; waits for those that are not there.
        micro_batch_size: decisions per micro-batch; by default, what arrives together.
        mini_batch_size: decisions per optimizer step; all of the update by default.
    """

    def __init__(
        self,
        arrivals: Callable[[], Iterator[TensorDictBase]],
        micro_batch_size: int | None = None,
        mini_batch_size: int | None = None,
    ) -> None:
        self._arrivals, self.micro_batch_size, self.mini_batch_size = arrivals, micro_batch_size, mini_batch_size

    def __iter__(self) -> Iterator[MicroBatch]:
        done, waiting = 0, None  # decisions of this mini-batch that were handed over, and those that wait
        for trajectories in self._arrivals():
            flat = valid_decisions(trajectories)
            waiting = flat if waiting is None else torch.cat([waiting, flat])
            while len(waiting) >= (size := self._size(done, len(waiting))) > 0:
                done += size
                ends = done == self.mini_batch_size
                done = 0 if ends else done
                yield MicroBatch(waiting[:size], ends)
                waiting = waiting[size:]
        if waiting is not None and len(waiting):
            yield MicroBatch(waiting, ends_mini_batch=False)

    def _size(self, done: int, waiting: int) -> int:
        """How many decisions the next micro-batch has."""
        size = self.micro_batch_size or waiting
        return size if self.mini_batch_size is None else min(size, self.mini_batch_size - done)


def valid_decisions(trajectories: TensorDictBase) -> TensorDictBase:
    """The decisions ``[B]`` of trajectories ``[N, T]`` that are no padding."""
    flat = trajectories.reshape(-1)
    valid = flat[keys.EXECUTED].any(-1)
    return flat if bool(valid.all()) else flat[valid]
