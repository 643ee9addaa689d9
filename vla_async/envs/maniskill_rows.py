"""Row-wise random numbers for ManiSkill's batched simulation: the seed of a row alone fixes that row's initial state.

ManiSkill draws the random numbers of all rows that restart together from one generator, seeded by the first row, so what
a row gets depends on its companions. Here every draw of an episode's initialisation is split by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vla_async.rng import normal, uniform


class RowStreams(TorchFunctionMode):
    """While it is active, ``torch.rand``, ``randn`` and ``randint`` give each row numbers of its own stream.

    Args:
        seeds: int64 ``[B]``, one per row; every draw must have ``B`` as its first dimension.
    """

    def __init__(self, seeds: Tensor) -> None:
        super().__init__()
        self.seeds, self._stream = seeds, 0
        self._draws: dict[Any, Callable[..., Tensor]] = {
            torch.rand: self._rand, torch.randn: self._randn, torch.randint: self._randint
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        draw = self._draws.get(func)
        return func(*args, **kwargs) if draw is None else draw(*args, **kwargs)

    def _shape(self, size: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
        size = kwargs.get("size", size)
        shape = tuple(int(length) for length in (size[0] if isinstance(size[0], tuple | list) else size))
        if shape[0] != self.seeds.numel():
            raise RuntimeError(f"a draw of shape {shape} cannot be split into {self.seeds.numel()} rows")
        self._stream += 1
        return shape[1:]

    def _finish(self, numbers: Tensor, kwargs: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers.to(device=kwargs.get("device"), dtype=kwargs.get("dtype") or dtype)

    def _rand(self, *size: Any, **kwargs: Any) -> Tensor:
        shape = self._shape(size, kwargs)
        return self._finish(uniform(self.seeds, *shape, stream=self._stream), kwargs)

    def _randn(self, *size: Any, **kwargs: Any) -> Tensor:
        shape = self._shape(size, kwargs)
        return self._finish(normal(self.seeds, *shape, stream=self._stream), kwargs)

    def _randint(self, *bounds_and_size: Any, **kwargs: Any) -> Tensor:
        *bounds, size = (*bounds_and_size, kwargs["size"]) if "size" in kwargs else bounds_and_size
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        shape = self._shape((size,), kwargs)
        numbers = low + torch.floor(uniform(self.seeds, *shape, stream=self._stream) * (high - low))
        return self._finish(numbers, kwargs, torch.int64)


class RowPlacementSampler:
    """Stands in for ManiSkill's ``UniformPlacementSampler``: each row takes the first of its own trials that fits.

    ManiSkill's sampler goes on until all rows fit and lets a row that had already found its place move again.

    Args:
        bounds: (low, high), each of length D.
        batch_size: B, the number of rows.
        device: where the positions live.
    """

    def __init__(self, bounds: tuple[list[float], list[float]], batch_size: int, device: Any = None) -> None:
        self._low, self._high = torch.as_tensor(bounds, dtype=torch.float32, device=device)
        self._rows = batch_size
        self._placed: list[tuple[Tensor, float]] = []

    def sample(self, radius: float, max_trials: int, append: bool = True, verbose: bool = False) -> Tensor:
        """Positions ``[B, D]``, each at least the sum of the radii away from what stands there already, if a trial is."""
        trials = torch.rand((self._rows, max_trials, len(self._low)), device=self._low.device)
        trials = trials * (self._high - self._low) + self._low
        fits = torch.ones(trials.shape[:2], dtype=torch.bool, device=trials.device)
        for placed, other in self._placed:
            fits &= torch.linalg.norm(trials - placed.unsqueeze(1), dim=-1) > float(radius) + other
        # the first trial that fits, or the last one if none does
        chosen = torch.where(fits.any(-1), fits.to(torch.int64).argmax(-1), max_trials - 1)
        position: Tensor = trials[torch.arange(self._rows, device=trials.device), chosen]
        if append:
            self._placed.append((position, float(radius)))
        return position


class _RowNormal:
    """The one method of NumPy's generator that ManiSkill's scene builders use, with one generator per row."""

    def __init__(self, generators: Any) -> None:
        self._generators = generators

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Any:
        return self._generators.normal(loc, scale, size[1:])


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def row_seeded(env_class: Any) -> Any:
    """A ManiSkill env class whose initial states are a function of each row's own seed.

    It has to be built with ``enhanced_determinism=True`` and reset with a list of one seed per row.
    """
    from mani_skill.envs.utils import randomization

    class RowSeeded(env_class):  # type: ignore[misc, unused-ignore]
        def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
            seeds = torch.as_tensor(self._episode_seed, device=env_idx.device)[env_idx]
            generators = _RowNormal(self._batched_episode_rng[env_idx])
            with (
                _swapped(self, "_episode_rng", generators),
                _swapped(randomization, "UniformPlacementSampler", RowPlacementSampler),
                RowStreams(seeds),
            ):
                super()._initialize_episode(env_idx, options)

    RowSeeded.__name__ = env_class.__name__
    return RowSeeded
