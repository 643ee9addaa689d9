"""``WeightPublisher``: hands versioned weights to all replicas, whole or not at all.

Two copies of the weights lie in shared memory. A publish writes the one that no replica uses, then says so; each replica
changes over between two batches, and says which version it holds and what that adds up to. The next publish waits for
that, because it overwrites the copy that they have left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async.monitor.timeline_track import Kind, Track, clock
from vla_async.shared_memory import Field, SharedBlock


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A number that tells apart any two sets of weights that ever differ in practice: it mixes the sums of their bits.

    Args:
        tensors: by name, on any device. The order of the names does not matter.
    """
    total = 0
    for name in sorted(tensors):
        total = (total * 1_000_003 + _sum_of_bits(tensors[name].detach())) & (2**62 - 1)
    return total


def _sum_of_bits(tensor: Tensor) -> int:
    """The sum of a tensor's bytes, in words of eight: by far the fastest width."""
    flat = tensor.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words = raw[: len(raw) // 8 * 8]
    return int(words.view(torch.int64).sum()) + int(raw[len(words) :].sum())


@dataclass
class SharedWeights:
    """What publisher and replicas share.

    Attributes:
        copies: two blocks with the same tensors, by name.
        header: int64 ``[2]``: the version that was published last, and the copy it lies in.
    """

    copies: tuple[SharedBlock, SharedBlock]
    header: SharedBlock

    @classmethod
    def allocate(cls, fields: Mapping[str, Field], version: int) -> SharedWeights:
        header = SharedBlock({"header": Field((2,), torch.int64)})
        header["header"].copy_(torch.tensor([version, 1]))  # the first publish writes copy 0
        return cls((SharedBlock(fields), SharedBlock(fields)), header)

    @property
    def newest(self) -> tuple[int, int]:
        """The version that was published last, and the copy it lies in."""
        version, copy = self.header["header"].tolist()
        return version, copy


class WeightPublisher:
    """Hands the trainable parameters and the buffers of a policy to the replicas; what is frozen, they have from the start.

    Args:
        policy: whose weights are published.
        num_replicas: how many replicas there are.
        version: number of updates behind the weights that the replicas start with, which are the policy's own.
        announce: tells all replicas to look at the shared weights.
        await_acks: waits for the next acknowledgements and returns them as (replica, version, checksum).
        track: where every publish is recorded; None if nobody wants to know.
    """

    def __init__(
        self,
        policy: nn.Module,
        num_replicas: int,
        version: int,
        announce: Callable[[], None],
        await_acks: Callable[[], list[tuple[int, int, int]]],
        track: Track | None = None,
    ) -> None:
        self.policy, self.num_replicas = policy, num_replicas
        self._announce, self._await_acks, self._track = announce, await_acks, track
        state = named_tensors(policy)
        self.names = published_names(policy)
        self.shared = SharedWeights.allocate(
            {name: Field(tuple(state[name].shape), state[name].dtype) for name in self.names}, version
        )
        self._frozen = {name: tensor._version for name, tensor in state.items() if name not in self.names}
        self._first = version
        self.version, self._checksum = version, checksum({name: state[name] for name in self.names})
        self._held: dict[int, int] = dict.fromkeys(range(num_replicas), -1)

    @property
    def latest(self) -> dict[str, Tensor] | None:
        """What was published last, by name; None if nothing was."""
        version, copy = self.shared.newest
        return self.shared.copies[copy].tensors if version != self._first else None

    @property
    def nbytes(self) -> int:
        """Bytes of one publish."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.shared.copies[0].tensors.values())

    def publish(self, version: int, weights: Any = None) -> None:
        """Make weights those of a version, in all replicas, each between two of its batches.

        Args:
            version: number of updates behind them; larger than the one before.
            weights: a module, a TensorDict or a dict with the policy's names; None for those of the policy itself.

        Raises:
            ValueError: if a tensor is missing, or of another shape, or the version is not larger.
            RuntimeError: if a frozen tensor has changed, or a replica holds something else than what was sent.
        """
        if version <= self.version:
            raise ValueError(f"version={version} is not larger than the last one published, {self.version}")
        source, began = self._source(weights), clock()
        self.confirm()
        confirmed = clock()
        copy = 1 - self.shared.newest[1]
        block = self.shared.copies[copy]
        for name in self.names:
            block[name].copy_(source[name].detach(), non_blocking=source[name].is_cuda)
        if any(source[name].is_cuda for name in self.names):
            torch.cuda.current_stream().synchronize()
        self.version, self._checksum = version, checksum(block.tensors)
        self.shared.header["header"].copy_(torch.tensor([version, copy]))
        self._announce()
        if self._track is not None:
            self._track.add(Kind.CONFIRM, began, confirmed, self.version)
            self._track.add(Kind.PUBLISH, began, clock(), version)

    def confirm(self) -> None:
        """Wait until every replica holds what was published last, for at most one batch of each, and prove it.

        Raises:
            RuntimeError: if a replica holds something else.
        """
        while any(held != self.version for held in self._held.values()):
            for replica, version, total in self._await_acks():
                self._held[replica] = version
                if version == self.version and total != self._checksum:
                    raise RuntimeError(
                        f"replica {replica} holds weights of version {version} that are not those published (checksum "
                        f"{total:x}, not {self._checksum:x})"
                    )

    def _source(self, weights: Any) -> dict[str, Tensor]:
        """Tensors by the policy's names."""
        if weights is None or weights is self.policy:
            state = named_tensors(self.policy)
            changed = [name for name, count in self._frozen.items() if state[name]._version != count]
            if changed:
                raise RuntimeError(f"{changed[0]} is frozen (requires_grad=False), so replicas keep it, but it has changed")
            return state
        given = plain_weights(weights)
        missing = [name for name in self.names if name not in given]
        if missing:
            raise ValueError(f"the weights lack {missing[:3]} ({len(missing)} in all); they hold {sorted(given)[:3]}...")
        for name in self.names:
            wanted = self.shared.copies[0][name].shape
            if given[name].shape != wanted:
                raise ValueError(f"{name} has shape {list(given[name].shape)}, but the policy's is {list(wanted)}")
        return given


def named_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a policy, those outside its state_dict included."""
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def published_names(policy: nn.Module) -> list[str]:
    """What a publish carries: the buffers, and the parameters that are trained (all of them, if none is)."""
    parameters = dict(policy.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    return sorted([*(trained or parameters), *dict(policy.named_buffers())])


def plain_weights(weights: Any) -> dict[str, Tensor]:
    """Weights of any form as tensors by dotted names.

    Raises:
        TypeError: for something that holds no weights.
    """
    if isinstance(weights, nn.Module):
        return named_tensors(weights)
    if isinstance(weights, TensorDictBase):
        return {str(name): leaf.data for name, leaf in weights.flatten_keys(".").items()}
    if isinstance(weights, Mapping):
        flat: dict[str, Tensor] = {}
        for name, value in weights.items():
            inner = {"": value} if isinstance(value, Tensor) else plain_weights(value)
            flat |= {f"{name}.{rest}".rstrip("."): tensor for rest, tensor in inner.items()}
        return flat
    raise TypeError(f"weights must be a module, a TensorDict or a dict of tensors, but are a {type(weights).__name__}")


class WeightReceiver:
    """A replica's end: changes over to newer weights when told to, which is between two batches.

    Args:
        policy: whose weights change.
        shared: what the publisher writes.
        copy: copy values instead of pointing parameters to the shared memory (on a GPU, or where addresses must stay).
    """

    def __init__(self, policy: nn.Module, shared: SharedWeights, copy: bool) -> None:
        self.shared, self._copy = shared, copy
        self._targets = {name: tensor for name, tensor in named_tensors(policy).items() if name in shared.copies[0].fields}
        self._parameters = {name for name, _ in policy.named_parameters()}
        self.version, _ = shared.newest

    def checksum(self) -> int:
        """Of what the policy holds now."""
        return checksum(self._targets)

    def update(self) -> bool:
        """Take over what was published last; False if that is what the policy holds."""
        version, copy = self.shared.newest
        if version == self.version:
            return False
        block = self.shared.copies[copy]
        with torch.no_grad():
            for name, target in self._targets.items():
                if self._copy or name not in self._parameters:
                    target.copy_(block[name], non_blocking=True)
                else:
                    target.data = block[name]
        self.version = version
        return True
