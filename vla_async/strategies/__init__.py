"""Strategies for Lightning Fabric whose gradient is the mean over all valid loss elements, however they are split.

Importing this package makes them known to Fabric by name: ``Fabric(strategy="size_weighted_ddp")``.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY

from vla_async.strategies.ddp import SizeWeightedDDPStrategy
from vla_async.strategies.fsdp import SizeWeightedFSDPStrategy
from vla_async.strategies.single_device import SizeWeightedSingleDeviceStrategy

__all__ = ["SizeWeightedDDPStrategy", "SizeWeightedFSDPStrategy", "SizeWeightedSingleDeviceStrategy"]

STRATEGY_REGISTRY.register("size_weighted_single", SizeWeightedSingleDeviceStrategy, "size-weighted, one device")
STRATEGY_REGISTRY.register("size_weighted_ddp", SizeWeightedDDPStrategy, "size-weighted, a copy of the model per rank")
STRATEGY_REGISTRY.register("size_weighted_fsdp", SizeWeightedFSDPStrategy, "size-weighted, sharded by FSDP2")
