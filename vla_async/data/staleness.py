"""How old the data is that an update consumes."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.monitor import metric_table as names


def staleness_of(trajectories: TensorDictBase, version: int) -> Tensor:
    """How old trajectories ``[N, T]`` are, int64 ``[N]``: the version that consumes them minus the oldest in them."""
    versions = trajectories[keys.POLICY_VERSION].squeeze(-1)
    valid = trajectories[keys.EXECUTED].any(-1)
    return version - torch.where(valid, versions, version).amin(-1)


def stamp_staleness(trajectories: TensorDictBase, version: int) -> Tensor:
    """Write into trajectories ``[N, T]`` how old they are; returns that, int64 ``[N]``."""
    staleness = staleness_of(trajectories, version)
    trajectories[keys.STALENESS] = staleness.reshape(-1, 1, 1).expand(*trajectories.shape, 1).clone()
    return staleness


class StalenessMeter:
    """Counts trajectories by staleness.

    Args:
        max_staleness: η, the largest that can occur.
    """

    def __init__(self, max_staleness: int) -> None:
        self.counts = torch.zeros(max_staleness + 1, dtype=torch.int64)

    def add(self, staleness: Tensor) -> None:
        """Count trajectories.

        Raises:
            RuntimeError: if one is older than the bound, which the queue has promised to prevent.
        """
        if int(staleness.max()) >= len(self.counts):
            raise RuntimeError(
                f"a trajectory of staleness {int(staleness.max())} was consumed: the bound is {len(self.counts) - 1}"
            )
        self.counts += torch.bincount(staleness.cpu(), minlength=len(self.counts))

    def metrics(self) -> dict[str, float]:
        """Min, mean, max, and the share of trajectories of each staleness."""
        counts = self.counts.tolist()
        total, seen = max(sum(counts), 1), [age for age, count in enumerate(counts) if count] or [0]
        return {
            names.STALENESS_MIN: float(seen[0]),
            names.STALENESS_MEAN: sum(age * count for age, count in enumerate(counts)) / total,
            names.STALENESS_MAX: float(seen[-1]),
            **{names.STALENESS_SHARE.of(age): count / total for age, count in enumerate(counts)},
        }
