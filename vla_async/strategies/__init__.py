"""Strategies for Lightning Fabric whose gradient is the mean over all valid loss elements, however they are split."""

from vla_async.strategies.size_weighted import SizeWeightedSingleDeviceStrategy

__all__ = ["SizeWeightedSingleDeviceStrategy"]
