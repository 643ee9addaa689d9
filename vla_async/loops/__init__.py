"""Loops: how training, imitation, evaluation and collection run."""

from vla_async.loops.base import Loop
from vla_async.loops.collect import CollectLoop, CollectReport
from vla_async.loops.evaluate import EvaluateLoop, EvaluationResult
from vla_async.loops.sft import SFTLoop
from vla_async.loops.streaming import StreamingFitLoop
from vla_async.loops.sync import SyncFitLoop

__all__ = [
    "CollectLoop",
    "CollectReport",
    "EvaluateLoop",
    "EvaluationResult",
    "Loop",
    "SFTLoop",
    "StreamingFitLoop",
    "SyncFitLoop",
]
