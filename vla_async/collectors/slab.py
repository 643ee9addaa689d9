"""``Slab``: trajectories, written once and in place, in memory that env workers, replicas and the trainer share.

A slot is written row by row. Decision ``t`` of a slot is row ``t``: what it saw, what was decided, and what came of it. Row
``T`` is what the slot's last decision led to. Where a slot may hold several episodes one after the other, rows ``T+1+t``
hold what decision ``t`` led to before the reset, if its episode ended there; row ``t+1`` is then the next episode's start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from vla_async import keys
from vla_async.shared_memory import Field, SharedBlock, block_bytes, free_shared_memory

Key = tuple[str, ...]
Role = Literal["observation", "outcome", "decision"]
TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
UNANSWERED = 2**62  # policy_version of a decision that no replica has answered yet


@dataclass(frozen=True)
class Leaf:
    """One array of every row.

    Attributes:
        key: its place in a TensorDict. An outcome stands under ``"next"``, an observation both there and at the root.
        shape: of one row.
        dtype: of its elements. A text is stored as UTF-8 bytes, zero-padded.
        role: ``observation``: what a decision sees; ``decision``: what was decided; ``outcome``: what came of it.
        is_text: whether it is a text.
        carried: an observation that the policy itself writes for its next decision (a recurrent state); the env only
            gives the first one of an episode.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    is_text: bool = False
    carried: bool = False


@dataclass(frozen=True)
class SlabLayout:
    """What a slab holds.

    Attributes:
        leaves: the arrays of a row.
        num_slots: S.
        decisions: T, the most decisions in a slot.
        spans_episodes: whether a slot goes on with the next episode of its env (a fragment of T decisions), or closes
            when its episode ends (a trajectory).
    """

    leaves: tuple[Leaf, ...]
    num_slots: int
    decisions: int
    spans_episodes: bool

    @property
    def rows_per_slot(self) -> int:
        """R."""
        return 2 * self.decisions + 1 if self.spans_episodes else self.decisions + 1

    @property
    def fields(self) -> dict[Key, Field]:
        return {leaf.key: Field((self.num_slots * self.rows_per_slot, *leaf.shape), leaf.dtype) for leaf in self.leaves}

    @property
    def nbytes(self) -> int:
        return block_bytes(self.fields)

    def check_fits(self, settings: str) -> None:
        """Refuse a slab that shared memory cannot hold, before it is allocated.

        Args:
            settings: which settings to lower.

        Raises:
            MemoryError: says how much is needed, by what, and how much there is.
        """
        free = free_shared_memory()
        if self.nbytes <= free:
            return
        largest = max(self.leaves, key=lambda leaf: math.prod(leaf.shape) * leaf.dtype.itemsize)
        raise MemoryError(
            f"the slab needs {human_bytes(self.nbytes)} of shared memory ({self}), but {human_bytes(free)} are free; lower "
            f"{settings}, or the size of {'.'.join(largest.key)} {list(largest.shape)}, which takes most; in a container, "
            "raise --shm-size"
        )

    def __str__(self) -> str:
        row = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)
        return f"{self.num_slots} slots of {self.rows_per_slot} rows of {human_bytes(row)}"


class Slab:
    """S slots in shared memory. Sent to another process, it is the same memory there.

    Args:
        layout: what it holds.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.block = SharedBlock(layout.fields)
        self.lengths = SharedBlock({"length": Field((layout.num_slots,), torch.int64)})

    @classmethod
    def attach(cls, layout: SlabLayout, block: SharedBlock, lengths: SharedBlock) -> Slab:
        """The slab of another process, from its parts."""
        slab = cls.__new__(cls)
        slab.layout, slab.block, slab.lengths = layout, block, lengths
        return slab

    @property
    def length(self) -> Tensor:
        """int64 ``[S]``, decisions in each closed slot."""
        return self.lengths["length"]

    def rows(self, key: Key) -> Tensor:
        """A leaf's rows of all slots, ``[S * R, ...]``: row ``t`` of slot ``s`` is ``s * R + t``."""
        return self.block[key]

    def next_rows(self, slots: Tensor) -> Tensor:
        """int64 ``[B, T]``: the row of what each decision of some slots led to."""
        T, R = self.layout.decisions, self.layout.rows_per_slot
        steps = torch.arange(T)
        base = slots.unsqueeze(1) * R
        if not self.layout.spans_episodes:
            return base + steps + 1
        done = self.rows(keys.DONE[1:])[base + steps].flatten(2).any(-1)
        return base + torch.where(done, T + 1 + steps, steps + 1)

    def bootstrap_rows(self, slot: int) -> list[int]:
        """The rows whose value a closed slot needs: where an episode was truncated or the slot ended before its episode."""
        base, length = slot * self.layout.rows_per_slot, int(self.length[slot])
        part = slice(base, base + length)
        done, terminated = self.rows(keys.DONE[1:])[part, 0], self.rows(keys.TERMINATED[1:])[part, 0]
        wanted = done & ~terminated
        wanted[-1] |= not done[-1]
        steps = torch.nonzero(wanted).flatten()
        return self.next_rows(torch.tensor([slot]))[0, steps].tolist()

    def read(self, slots: Sequence[int], length: int | None = None, texts: bool = True) -> TensorDict:
        """Copy slots out, in TorchRL's layout.

        Args:
            slots: which.
            length: decisions of each; those of the longest by default. Shorter ones are padded with whatever is there.
            texts: whether to read texts too, which takes longest.

        Returns:
            TensorDict ``[B, T]``, whose last dimension is named ``"time"``, with ``("collector", "mask")`` if some slot is
            shorter.
        """
        chosen = torch.tensor(list(slots), dtype=torch.int64)
        lengths = self.length[chosen]
        T = int(lengths.max()) if length is None else length
        here = chosen.unsqueeze(1) * self.layout.rows_per_slot + torch.arange(T)
        following = self.next_rows(chosen)[:, :T]
        names = [None, "time"]
        out = TensorDict({"next": TensorDict({}, [len(slots), T], names=names)}, [len(slots), T], names=names)
        for leaf in self.layout.leaves:
            if leaf.is_text and not texts:
                continue
            if leaf.role != "outcome":
                out.set(leaf.key, self._take(leaf, here))
            if leaf.role != "decision":
                out.set(("next", *leaf.key), self._take(leaf, following if leaf.role == "observation" else here))
        if (keys.VALUE,) in self.block.fields:
            value = self.rows((keys.VALUE,))[following.flatten()].view(*following.shape, -1)
            out.set(keys.NEXT_VALUE, torch.where(out.get(keys.TERMINATED), 0.0, value))
        for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED):
            if key in out.keys(True):
                out.set(key[1:], torch.zeros_like(out.get(key)))  # an episode that has ended is never decided on
        if bool((lengths < T).any()):
            out.set(MASK, torch.arange(T) < lengths.unsqueeze(1))
        return out

    def _take(self, leaf: Leaf, rows: Tensor) -> Any:
        flat = torch.index_select(self.rows(leaf.key), 0, rows.flatten())
        if leaf.is_text:
            return read_texts(flat, rows.shape, names=(None, "time"))  # without the names, it would be copied to get them
        return flat.view(*rows.shape, *leaf.shape)

    def oldest_version(self, slot: int) -> int:
        """The policy_version of a slot's first decision, which no later one is older than."""
        return int(self.rows((keys.POLICY_VERSION,))[slot * self.layout.rows_per_slot])


def read_texts(rows: Tensor, shape: Sequence[int], names: Sequence[str | None] | None = None) -> NonTensorStack:
    """The texts of UTF-8 rows ``[N, bytes]``, as a stack of a batch shape with N elements, its dimensions named."""
    raw = [row.tobytes() for row in rows.numpy()]
    known = {text: NonTensorData(text.rstrip(b"\0").decode(), batch_size=[]) for text in set(raw)}
    return _stacked([_another(known[text]) for text in raw], shape, names or [None] * len(shape))


def _another(text: NonTensorData) -> NonTensorData:
    """One more of the same, at a tenth of what its constructor or ``clone`` takes.

    Rows must not share one: TensorDict changes texts in place, so all rows with an equal text would change with one.
    """
    other = object.__new__(NonTensorData)
    other.__dict__.update(text.__dict__)
    other.__dict__["_tensordict"] = TensorDict._new_unsafe({}, batch_size=torch.Size([]))
    other.__dict__["_non_tensordict"] = dict(text._non_tensordict)
    return other


def _stacked(level: list[Any], shape: Sequence[int], names: Sequence[str | None]) -> NonTensorStack:
    """Stacks of stacks, made without looking at each element again, which takes longer than reading all the tensors."""
    size = len(level) // shape[0] if shape[0] else 0
    parts = level
    if len(shape) > 1:
        parts = [_stacked(level[i * size : (i + 1) * size], shape[1:], names[1:]) for i in range(shape[0])]
    if not parts:
        return NonTensorStack.from_list([])
    stack: NonTensorStack = NonTensorStack._new_lazy_unsafe(*parts, stack_dim=0, stack_dim_name=names[0])
    return stack


def write_text(text: str, out: Tensor) -> None:
    """Write a text into a UTF-8 row.

    Raises:
        ValueError: if it is too long.
    """
    data = text.encode()
    if len(data) > out.shape[-1]:
        raise ValueError(
            f"the text {text[:60]!r}... has {len(data)} bytes, but the slab holds {out.shape[-1]} (max_text_bytes)"
        )
    out.zero_()
    if data:
        out[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def human_bytes(size: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
