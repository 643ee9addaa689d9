"""What a trainer does at the end of a run, whatever ends it; and what that is the end of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from vla_async.fabric import torch_threads
from vla_async.loops.base import Loop
from vla_async.monitor.loggers import RunLogger

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


@contextmanager
def winding_up(trainer: AsyncTrainer, loop: Loop | None = None) -> Iterator[None]:
    """Begin the loggers; on every kind of exit, tell the callbacks and close whatever is open. No interrupt gets into that.

    The exit stacks make every call, the one pushed last first, whatever the others raise. An interrupt for which a wait had
    to be ended is the error, else another rank that was lost, whatever they have led to here. An interrupt is for rank 0
    alone, which ends the others.
    """
    status, interrupts, ranks = "success", trainer.interrupts, trainer.ranks
    interrupts.unheeded = ranks.end_others if ranks.links is not None else None
    with ExitStack() as around:
        around.enter_context(interrupts)
        num_ranks = 1 if loop is None else ranks.settings.num_ranks
        around.enter_context(torch_threads(trainer.num_threads, trainer.env, num_ranks))
        if not ranks.is_first:
            around.enter_context(interrupts.shielded())
        try:
            for logger in trainer.fabric.loggers:
                if isinstance(logger, RunLogger):
                    logger.begin_run(trainer.run.path)
            yield
        except BaseException as raised:
            status = "failed"
            with interrupts.shielded(), ExitStack() as calls:
                cause = interrupts.cause() or ranks.cause() if isinstance(raised, RuntimeError) else None
                error = cause or raised
                ranks.fail(error)
                for callback in reversed(trainer.callbacks):
                    calls.callback(callback.on_exception, trainer, error)
            if error is not raised:
                raise error from raised
            raise
        finally:
            with interrupts.shielded(), ExitStack() as calls:
                calls.callback(trainer.timeline.close)  # when nobody records any more
                calls.callback(ranks.close)
                calls.callback(trainer.fabric.strategy.teardown)
                for logger in trainer.fabric.loggers:
                    calls.callback(logger.finalize, status)
                for callback in reversed(trainer.callbacks):
                    calls.callback(callback.on_end, trainer)
                calls.callback(trainer.evaluate_loop.close)
                calls.callback(trainer.validation.close)
                if loop is not None:
                    calls.callback(loop.close)
