"""States and actions between the envs' units and a model's: statistics, normalisation, padding and discretisation.

A pretrained model was trained on numbers that were normalised by the statistics of its data, so the same statistics must
be used with it. They are plain numbers here (``Statistics``), and buffers in the policy (``Normalizer``), so that they are
saved in its checkpoint and published with its weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

NormalizationMode = Literal["mean_std", "quantiles", "min_max", "identity"]
"""``mean_std``: zero mean, unit deviation. ``quantiles`` and ``min_max``: q01 and q99, or min and max, become -1 and 1."""

_FIELDS: dict[str, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "quantiles": ("q01", "q99"),
    "min_max": ("min", "max"),
    "identity": (),
}


_STILL = 1e-4  # of a metre or a radian, what simulators let a joint tremble by


@dataclass(frozen=True)
class Statistics:
    """What is known of each element of a vector of length D. Build :class:`StateStatistics` or :class:`ActionStatistics`.

    Args:
        mode: how to normalise; it needs its own two of the fields below, the others may be left out.
        mean: of each element, length D, as all of the following.
        std: standard deviation.
        q01: first percentile.
        q99: last percentile.
        min: smallest value.
        max: largest value.
        mask: false for elements that stay as they are, for example a gripper's; all are normalised by default.
        eps: added to the deviation or the range, as the model's own code does, so that constant elements do not divide by 0.

    Raises:
        ValueError: names the statistic and the field that is missing, not finite, of another length, or in the wrong order.
    """

    mode: NormalizationMode
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    q01: Sequence[float] | None = None
    q99: Sequence[float] | None = None
    min: Sequence[float] | None = None
    max: Sequence[float] | None = None
    mask: Sequence[bool] | None = None
    eps: float = 1e-6

    kind = "the statistics"

    def __post_init__(self) -> None:
        if self.mode not in _FIELDS:
            raise ValueError(f"{self.kind}: mode={self.mode!r} is unknown; choose one of {sorted(_FIELDS)}")
        if not (math.isfinite(self.eps) and self.eps >= 0.0):
            raise ValueError(f"{self.kind}: eps={self.eps} must be a finite number, not below 0")
        needed = _FIELDS[self.mode]
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"{self.kind}: {name!r} is missing, but mode={self.mode!r} needs it; add it")
        for name in [name for names in _FIELDS.values() for name in names if getattr(self, name) is not None]:
            self._check_numbers(name)
        if self.mask is not None:
            object.__setattr__(self, "mask", tuple(bool(keep) for keep in self.mask))
        lengths = {name: len(getattr(self, name)) for name in (*needed, "mask") if getattr(self, name) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.kind}: the lengths differ: {lengths}")
        self._check_order()

    def _check_numbers(self, name: str) -> None:
        given = getattr(self, name)
        try:
            values = tuple(float(value) for value in given)
        except (TypeError, ValueError):
            raise ValueError(f"{self.kind}: {name}={given!r} must be a list of numbers, one for each element") from None
        bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
        if bad:
            raise ValueError(f"{self.kind}: {name!r} is not finite in elements {bad}; compute the statistics again")
        object.__setattr__(self, name, values)

    def _check_order(self) -> None:
        if self.mode == "identity":
            return
        low, high = (cast("tuple[float, ...]", getattr(self, name)) for name in _FIELDS[self.mode])
        if self.mode == "mean_std":
            bad = [index for index, std in enumerate(high) if std < 0.0]
        else:
            bad = [index for index, (a, b) in enumerate(zip(low, high, strict=True)) if b < a]
        if bad:
            trouble = "is negative" if self.mode == "mean_std" else f"is below {_FIELDS[self.mode][0]!r}"
            raise ValueError(f"{self.kind}: {_FIELDS[self.mode][1]!r} {trouble} in elements {bad}")

    @property
    def dim(self) -> int | None:
        """D, or None if nothing says it."""
        lengths = [len(getattr(self, name)) for name in (*_FIELDS[self.mode], "mask") if getattr(self, name) is not None]
        return lengths[0] if lengths else None

    def affine(self, dim: int) -> tuple[Tensor, Tensor]:
        """Offset and scale, float32 ``[D]``: normalised = (x - offset) / scale.

        Raises:
            ValueError: if the statistics have another length than ``dim``.
        """
        if self.dim not in (None, dim):
            raise ValueError(f"{self.kind} have {self.dim} elements, but {dim} are needed; take those of this robot")
        if self.mode == "identity":
            return torch.zeros(dim), torch.ones(dim)
        first, second = (torch.tensor(getattr(self, name), dtype=torch.float64) for name in _FIELDS[self.mode])
        if self.mode == "mean_std":
            offset, scale = first, second + self.eps
        else:
            scale = (second - first + self.eps) / 2.0
            offset = first + scale
        if (scale == 0.0).any():
            constant = torch.nonzero(scale == 0.0).flatten().tolist()
            raise ValueError(f"{self.kind}: elements {constant} are constant and eps is 0; set eps above 0")
        if self.mask is not None:
            mask = torch.tensor(self.mask)
            offset, scale = torch.where(mask, offset, 0.0), torch.where(mask, scale, 1.0)
        return offset.float(), scale.float()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, without what is not set."""
        plain = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], mode: NormalizationMode | None = None) -> Self:
        """Read the statistics of a release, which may have more fields than the mode needs.

        Args:
            plain: numbers by the field names above; others, such as ``count``, are left aside.
            mode: how to normalise, unless ``plain["mode"]`` says it.
        """
        mode = plain.get("mode") if mode is None else mode
        if mode is None:
            raise ValueError(f"{cls.kind}: no 'mode' is given; choose one of {sorted(_FIELDS)}")
        wanted = (*_FIELDS.get(mode, ()), "mask", "eps")
        return cls(mode=mode, **{name: plain[name] for name in wanted if plain.get(name) is not None})

    @classmethod
    def measure(cls, values: Tensor, mode: NormalizationMode) -> Self:
        """The statistics of demonstrated values ``[N, D]``.

        An element that did not move gets a deviation of 1, or a range of 1 to both sides: divided by what is measured of it,
        it would explode as soon as it does.
        """
        values = values.to(torch.float64)
        measured: dict[str, Tensor] = {}
        if mode == "mean_std":
            mean, std = values.mean(0), values.std(0, correction=0)
            measured = {"mean": mean, "std": torch.where(std < _STILL, 1.0, std)}
        elif mode in ("min_max", "quantiles"):
            by_rank = mode == "quantiles"
            low = torch.quantile(values, 0.01, dim=0) if by_rank else values.amin(0)
            high = torch.quantile(values, 0.99, dim=0) if by_rank else values.amax(0)
            around = (high - low < _STILL).to(torch.float64)
            measured = dict(zip(_FIELDS[mode], (low - around, high + around), strict=True))
        return cls.from_dict({name: value.tolist() for name, value in measured.items()}, mode)


class StateStatistics(Statistics):
    """Statistics of the state that a model reads."""

    kind = "the state statistics"


class ActionStatistics(Statistics):
    """Statistics of the actions that a model was trained to give."""

    kind = "the action statistics"

    @classmethod
    def of_bounds(cls, low: Sequence[float], high: Sequence[float]) -> ActionStatistics:
        """The bounds of the envs' actions become -1 and 1: for a model that was trained on no other data.

        Raises:
            ValueError: if an action element is unbounded.
        """
        if not all(math.isfinite(bound) for bound in (*low, *high)):
            raise ValueError(
                "the envs' actions are unbounded, so nothing says how to normalise them; give action statistics"
            )
        return cls(mode="min_max", min=low, max=high, eps=0.0)


def read_statistics(path: str | Path, *names: str) -> dict[str, Any]:
    """Read one entry of a JSON file of statistics, ready for :meth:`Statistics.from_dict`.

    Args:
        path: the file, such as ``dataset_statistics.json``, ``norm_stats.json`` or ``stats.json``.
        names: which entry, from the outside inwards, for example ``"libero_spatial", "action"``.

    Raises:
        ValueError: if there is no such file or entry; names what there is.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there are no statistics at {file}; give the file that was released with the model")
    found: Any = json.loads(file.read_text())
    for depth, name in enumerate(names):
        if not isinstance(found, dict) or name not in found:
            there = sorted(found) if isinstance(found, dict) else "no names"
            raise ValueError(f"{file} has no {'/'.join(names[: depth + 1])!r}; there is {there}")
        found = found[name]
    if not isinstance(found, dict):
        raise ValueError(f"{'/'.join(names)!r} in {file} holds no statistics by name")
    return found


class Normalizer(nn.Module):
    """Between the envs' units and a model's. The numbers are buffers: they are saved and published with the weights.

    Args:
        statistics: what to normalise by.
        dim: D, the length of the vector in the envs; the statistics must have the same.
        clip: normalised values are held within ``[-clip, clip]``; None leaves them. An element that was constant in the
            data has a huge normalised value as soon as it moves.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, statistics: Statistics, dim: int, clip: float | None = None) -> None:
        super().__init__()
        if clip is not None and not clip > 0.0:
            raise ValueError(f"clip={clip} of {statistics.kind} must be positive, or None")
        offset, scale = statistics.affine(dim)
        self.kind, self.clip = statistics.kind.removesuffix(" statistics"), clip
        self.register_buffer("offset", offset)
        self.register_buffer("scale", scale)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != len(self.offset):
            raise ValueError(f"{self.kind} has {x.shape[-1]} elements, but its statistics have {len(self.offset)}")

    def normalize(self, x: Tensor) -> Tensor:
        """From the envs' units ``[*B, D]`` to the model's, float32."""
        self._check(x)
        normalized = (x.float() - self.offset) / self.scale
        return normalized if self.clip is None else normalized.clamp(-self.clip, self.clip)

    def unnormalize(self, x: Tensor) -> Tensor:
        """From the model's units ``[*B, D]`` to the envs', float32."""
        self._check(x)
        return x.float() * self.scale + self.offset


def pad_last(x: Tensor, dim: int, name: str = "the vector") -> Tensor:
    """Append zeros until the last dimension has ``dim`` elements.

    Raises:
        ValueError: if there are more than ``dim`` already; names the vector.
    """
    if x.shape[-1] > dim:
        raise ValueError(f"{name} has {x.shape[-1]} elements, but the model has room for {dim}")
    return nn.functional.pad(x, (0, dim - x.shape[-1]))


def discretize(x: Tensor, num_bins: int) -> Tensor:
    """The bin of each normalised value, int64: ``num_bins`` equal ones span [-1, 1]; -1 below, the last one above.

    This is how π0.5 writes a state into its prompt, the -1 for values below the range included.
    """
    edges = torch.linspace(-1.0, 1.0, num_bins + 1, dtype=torch.float64, device=x.device)[:-1]
    return torch.bucketize(x.to(torch.float64), edges, right=True) - 1
