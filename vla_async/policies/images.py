"""Images between the envs and a model: camera names, size and range.

Envs give uint8 ``[*B, C, H, W]``. Models take floats in [-1, 1], where black is -1, at their own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional

Interpolation = Literal["bilinear", "bicubic"]
Padding = Literal["center", "left_top"]


def to_unit_range(images: Tensor) -> Tensor:
    """uint8 to float32 in [-1, 1]; floats are taken to be in that range already."""
    return images.float() / 127.5 - 1.0 if images.dtype == torch.uint8 else images.float()


def resize(
    images: Tensor, height: int, width: int, interpolation: Interpolation = "bilinear", antialias: bool = True
) -> Tensor:
    """Resize without keeping the aspect ratio.

    Args:
        images: uint8, or float in [-1, 1], ``[*B, C, H, W]``.
        height: of the result.
        width: of the result.
        interpolation: how to interpolate; ``bicubic`` may overshoot and is held within [-1, 1].
        antialias: whether a smaller image averages over all pixels of the larger one, as PIL and JAX do and torch's own
            ``interpolate`` does not.

    Returns:
        float32 ``[*B, C, height, width]`` in [-1, 1].
    """
    scaled = to_unit_range(images)
    if scaled.shape[-2:] == (height, width):
        return scaled
    flat = scaled.reshape(-1, *scaled.shape[-3:])
    flat = functional.interpolate(flat, (height, width), mode=interpolation, align_corners=False, antialias=antialias)
    return flat.clamp(-1.0, 1.0).reshape(*scaled.shape[:-2], height, width)


def resize_with_pad(
    images: Tensor,
    height: int,
    width: int,
    pad_value: float = -1.0,
    *,
    where: Padding = "center",
    interpolation: Interpolation = "bilinear",
    antialias: bool = True,
) -> Tensor:
    """Resize with the aspect ratio kept, and fill the rest.

    Args:
        images: uint8, or float in [-1, 1], ``[*B, C, H, W]``.
        height: of the result.
        width: of the result.
        pad_value: in the range of the result; -1 is black.
        where: ``center`` puts the image into the middle, an odd row or column more below and on the right (π0, π0.5);
            ``left_top`` fills on the left and at the top only (SmolVLA).
        interpolation: as in :func:`resize`.
        antialias: as in :func:`resize`.

    Returns:
        float32 ``[*B, C, height, width]`` in [-1, 1].
    """
    ratio = max(images.shape[-1] / width, images.shape[-2] / height)
    # cut, not rounded, as the releases do
    size = (max(int(images.shape[-2] / ratio), 1), max(int(images.shape[-1] / ratio), 1))
    small = resize(images, *size, interpolation, antialias)
    rows, columns = height - size[0], width - size[1]
    top, left = (rows, columns) if where == "left_top" else (rows // 2, columns // 2)
    return functional.pad(small, (left, columns - left, top, rows - top), value=pad_value)


def center_crop(images: Tensor, area: float) -> Tensor:
    """The middle of an image, ``area`` of its surface, for models that were trained on random crops of that area.

    Args:
        images: any type ``[*B, C, H, W]``.
        area: share of the surface, in (0, 1].

    Returns:
        ``[*B, C, H', W']`` with sides of about ``sqrt(area)`` of the former ones, in whole pixels.
    """
    if not 0.0 < area <= 1.0:
        raise ValueError(f"area={area} of the crop must lie in (0, 1]")
    height, width = (max(round(side * area**0.5), 1) for side in images.shape[-2:])
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]


def standardize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalise each channel, for backbones whose mean and deviation are given for the range [0, 1].

    Args:
        images: float in [-1, 1], ``[*B, C, H, W]``.
        mean: of each channel, in [0, 1].
        std: of each channel, in [0, 1].
    """
    shape = (len(mean), 1, 1)
    means, stds = (images.new_tensor(list(values)).reshape(shape) for values in (mean, std))
    return ((images + 1.0) / 2.0 - means) / stds


@dataclass(frozen=True)
class Cameras:
    """Which camera of the envs stands in which of a model's camera slots.

    Args:
        slots: names of the model's cameras, in its order.
        available: ``(C, H, W)`` of the envs' cameras by name, as in ``EnvSpec.images``.
        mapping: slot to camera. By default a slot shows the camera of its own name.
        allow_missing: whether a slot may have no camera; it then shows black and is masked out.

    Raises:
        ValueError: names the slot or the camera that is missing or not in colour, and what there is.
    """

    slots: tuple[str, ...]
    available: Mapping[str, tuple[int, int, int]]
    mapping: Mapping[str, str | None] = field(default_factory=dict)
    allow_missing: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.mapping) - set(self.slots))
        if unknown:
            raise ValueError(f"cameras: the model has no slots {unknown}; it has {list(self.slots)}")
        missing = []
        for slot in self.slots:
            camera = self.mapping.get(slot, slot)
            if camera is None or camera not in self.available:
                missing.append(f"{slot!r} (camera {camera!r})")
            elif self.available[camera][0] != 3:
                raise ValueError(f"cameras: {camera!r} has {self.available[camera][0]} channels, but {slot!r} needs 3 (RGB)")
        names = sorted(self.available)
        if missing and not self.allow_missing:
            raise ValueError(
                f"cameras: no images for {', '.join(missing)}; the envs have {names}. Map each slot to one of them "
                "(cameras: {slot: camera}), or allow missing cameras, which are then masked out"
            )
        if len(missing) == len(self.slots):
            raise ValueError(f"cameras: none of the model's slots {list(self.slots)} has a camera; the envs have {names}")

    @classmethod
    def of(cls, available: Mapping[str, tuple[int, int, int]], names: Sequence[str] | None = None) -> Cameras:
        """A slot for each of the named cameras, for models that take any; by default all there are, ``image`` first."""
        seen = sorted(available, key=lambda name: (name != "image", name)) if names is None else list(names)
        return cls(tuple(seen), available)

    @property
    def sources(self) -> tuple[str | None, ...]:
        """The envs' camera of each slot, None where it has none."""
        cameras = (self.mapping.get(slot, slot) for slot in self.slots)
        return tuple(camera if camera in self.available else None for camera in cameras)

    def read(self, td: TensorDictBase) -> tuple[list[Tensor], Tensor]:
        """The images of a batch of decisions.

        Args:
            td: ``("observation", camera)`` uint8 ``[B, 3, H, W]``.

        Returns:
            One uint8 tensor ``[B, 3, H, W]`` per slot (black where there is no camera), and bool ``[B, slots]``, true
            where there is one.
        """
        images = [None if camera is None else td["observation", camera] for camera in self.sources]
        first = next(image for image in images if image is not None)
        mask = torch.tensor([image is not None for image in images], device=first.device)
        shown = [torch.zeros_like(first) if image is None else image for image in images]
        return shown, mask.expand(len(first), -1)
