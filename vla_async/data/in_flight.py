"""Finished trajectories that wait for their update, as a checkpoint holds them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vla_async import keys
from vla_async.collectors.slab import Slab

Bundle = tuple[int, ...]
"""The slots that are handed out together: one, or all of a group."""
InFlight = Literal["drop", "save"]
"""What becomes of trajectories that are finished and not consumed when a checkpoint is written: a run that is resumed from
it has lost and counts them, or consumes them first, unless they are too old by then. Those in progress are always lost.
"""


def save_bundles(slab: Slab, bundles: Sequence[Bundle]) -> dict[str, Any]:
    """A copy of what some bundles of slots hold, made of plain values and tensors."""
    slots = torch.tensor([slot for bundle in bundles for slot in bundle], dtype=torch.int64)
    return {
        "layout": _layout(slab),
        "sizes": [len(bundle) for bundle in bundles],
        "lengths": slab.length[slots].clone(),
        "leaves": {"/".join(leaf.key): slab.rows(leaf.key)[_rows(slab, slots)] for leaf in slab.layout.leaves},
    }


def restore_bundles(slab: Slab, saved: dict[str, Any], version: int, room: int) -> list[Bundle]:
    """Write saved bundles into the first slots of a slab that nobody uses yet.

    What was decided with newer weights than are resumed with is left out: these weights are lost. So is, where there are
    too many, what began with the oldest weights; and everything, with a warning, if the slots hold something else now.

    Args:
        slab: where to.
        saved: from :func:`save_bundles`.
        version: number of updates behind the weights that are resumed with.
        room: the most bundles.

    Returns:
        The slots that they are in now, in the order in which they were saved.
    """
    if saved["layout"] != _layout(slab):
        number = len(saved["lengths"])
        warnings.warn(
            f"the checkpoint's {number} trajectories in flight are dropped: they are of another shape than this run's "
            "(another fit_loop.decisions_per_env, env or model)",
            stacklevel=2,
        )
        return []
    oldest, newest = _versions(slab, saved)
    bundles = [part.tolist() for part in torch.arange(len(oldest)).split(saved["sizes"])] if len(oldest) else []
    usable = [bundle for bundle in bundles if max(int(newest[place]) for place in bundle) <= version]
    usable.sort(key=lambda bundle: -min(int(oldest[place]) for place in bundle))
    kept = sorted(usable[:room])
    source = torch.tensor([place for bundle in kept for place in bundle], dtype=torch.int64)
    target = torch.arange(len(source))
    slab.length[target] = saved["lengths"][source]
    for leaf in slab.layout.leaves:
        slab.rows(leaf.key)[_rows(slab, target)] = saved["leaves"]["/".join(leaf.key)][_rows(slab, source)]
    parts = target.split([len(bundle) for bundle in kept]) if kept else ()
    return [tuple(part.tolist()) for part in parts]


def _rows(slab: Slab, slots: Tensor) -> Tensor:
    """All rows of some slots, one after the other."""
    number = slab.layout.rows_per_slot
    return (slots.unsqueeze(-1) * number + torch.arange(number)).flatten()


def _versions(slab: Slab, saved: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The first and the newest policy_version of each saved slot."""
    versions = saved["leaves"][keys.POLICY_VERSION].reshape(-1, slab.layout.rows_per_slot)
    steps = torch.arange(slab.layout.rows_per_slot)
    within = steps < saved["lengths"].unsqueeze(-1)
    return versions[:, 0], torch.where(within, versions, -1).amax(-1)


def _layout(slab: Slab) -> dict[str, Any]:
    """What two slabs must have in common for a slot of one to be a slot of the other."""
    leaves = {"/".join(leaf.key): [str(leaf.dtype), *leaf.shape] for leaf in slab.layout.leaves}
    return {"decisions": slab.layout.decisions, "spans_episodes": slab.layout.spans_episodes, "leaves": leaves}
