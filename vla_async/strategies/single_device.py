"""Size-weighted accumulation on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies import SingleDeviceStrategy

from vla_async.strategies.size_weighted import SizeWeighted


class SizeWeightedSingleDeviceStrategy(SizeWeighted, SingleDeviceStrategy):
    """One device. The gradient is the mean over all valid loss elements of a step, however they were split.

    Args:
        device: the device; by default the one that Fabric chooses.
        accelerator: as in Lightning.
        checkpoint_io: as in Lightning.
        precision: as in Lightning.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            device="cpu" if device is None else device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._is_given = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, if it is given; where there is None, Fabric fills in what its own arguments say."""
        return [self._root_device] if self._is_given else None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"{type(self).__name__} has one device, but Fabric has devices={len(devices)}; "
                "set devices=1, or take the strategy size_weighted_ddp or size_weighted_fsdp"
            )
        self._root_device, self._is_given = devices[0], True
