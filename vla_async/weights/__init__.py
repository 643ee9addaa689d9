"""How weights get from the trainer to the replicas."""

from vla_async.weights.publisher import WeightPublisher

__all__ = ["WeightPublisher"]
