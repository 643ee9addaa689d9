"""``Placement``: which device plays which role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["colocated", "disaggregated", "hybrid"]


@dataclass(frozen=True)
class Placement:
    """On which devices the replicas decide, seen from the devices that train.

    Args:
        mode: ``colocated``: on the very devices that train; ``disaggregated``: on others; ``hybrid``: on those and on
            others. A CPU may play several roles in every mode.
        rollout_devices: one replica on each; for ``colocated`` by default the devices that train.

    Raises:
        ValueError: names the setting, its value and the fix.
    """

    mode: Mode = "colocated"
    rollout_devices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("colocated", "disaggregated", "hybrid"):
            raise ValueError(f"placement.mode={self.mode!r}: choose colocated, disaggregated or hybrid")
        if self.rollout_devices is not None and not self.rollout_devices:
            raise ValueError("placement.rollout_devices is empty; give at least one device, or null")
        if self.mode != "colocated" and self.rollout_devices is None:
            raise ValueError(f"placement.mode={self.mode!r} needs placement.rollout_devices, for example ['cuda:1']")
        for device in self.rollout_devices or []:
            try:
                kind = torch.device(device).type
            except RuntimeError as error:
                raise ValueError(f"placement.rollout_devices has {device!r}: {error}") from None
            if kind not in ("cpu", "cuda"):
                raise ValueError(f"placement.rollout_devices has {device!r}: choose cpu, or cuda with an index")

    def replicas(self, trainer_devices: Sequence[torch.device]) -> list[torch.device]:
        """The device of each replica.

        Raises:
            ValueError: if they contradict the mode.
        """
        training = [_indexed(device) for device in trainer_devices]
        rollout = (
            training if self.rollout_devices is None else [_indexed(torch.device(name)) for name in self.rollout_devices]
        )
        shared = [device for device in rollout if device in training and device.type != "cpu"]
        others = [device for device in rollout if device not in training or device.type == "cpu"]
        trains = bool(shared) or training[0].type == "cpu"
        names = f"placement.rollout_devices={_names(rollout)}"
        if self.mode == "colocated" and set(rollout) != set(training):
            raise ValueError(f"{names} are not the devices that train, {_names(training)}; use disaggregated or hybrid")
        if self.mode == "disaggregated" and shared:
            raise ValueError(f"{names} share {_names(shared)} with training; use hybrid, or give other devices")
        if self.mode == "hybrid" and not (trains and others):
            raise ValueError(f"{names} must hold a device that trains, {_names(training)}, and another; or use another mode")
        known = torch.cuda.device_count()
        for device in rollout:
            if device.type == "cuda" and device.index not in range(known):
                raise ValueError(f"{names}: {device} does not exist, torch sees {known} CUDA devices")
        return rollout


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if str(device) == "cuda" else device


def _names(devices: Sequence[torch.device]) -> list[str]:
    return sorted(str(device) for device in devices)
