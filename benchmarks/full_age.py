"""``FullAgeFitLoop``: asynchronous training on the oldest data that the bound on staleness allows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vla_async.loops import StreamingFitLoop
from vla_async.loops.rollouts import Rollouts

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

_POLL_S = 0.002


class FullAgeFitLoop(StreamingFitLoop):
    """Begins an update only when every slot is full.

    The bound η says how old data may get; how old it does get depends on which is faster, rollouts or training. With all
    η + 1 global batches waiting, the one that is consumed was made η updates ago: from the η-th update on, every
    trajectory has a staleness of η, whatever the machine does. So this is the worst case of a bound, and the same data
    whichever side is faster. It is no way to train: rollouts and training take turns.

    Consumes, Waits for, Produces, Unblocked by: as :class:`StreamingFitLoop`, but each update waits for a full queue.
    """

    def _step_update(self, trainer: AsyncTrainer, rollouts: Rollouts) -> None:
        queue, full = rollouts.fleet.queue, (self.max_staleness + 1) * rollouts.plan.bundles
        while len(queue) < full and not queue.interrupted:  # looking raises what a process has failed with
            time.sleep(_POLL_S)
        super()._step_update(trainer, rollouts)
