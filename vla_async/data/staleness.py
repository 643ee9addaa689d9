"""How old the data is that an update consumes."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys


def stamp_staleness(trajectories: TensorDictBase, version: int) -> Tensor:
    """Write into trajectories ``[N, T]`` how old they are: the version that consumes them minus the oldest in them.

    Returns:
        int64 ``[N]``.
    """
    versions = trajectories[keys.POLICY_VERSION].squeeze(-1)
    valid = trajectories[keys.EXECUTED].any(-1)
    oldest = torch.where(valid, versions, version).amin(-1)
    staleness = version - oldest
    trajectories[keys.STALENESS] = staleness.reshape(-1, 1, 1).expand(*versions.shape, 1).clone()
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
        """Mean, max, and the share of trajectories of each staleness."""
        total = max(int(self.counts.sum()), 1)
        ages = torch.arange(len(self.counts))
        seen = ages[self.counts > 0]
        shares = {f"staleness/share_{age}": count / total for age, count in enumerate(self.counts.tolist())}
        mean = float((ages * self.counts).sum()) / total
        return {"staleness/mean": mean, "staleness/max": float(seen.max()) if len(seen) else 0.0, **shares}
