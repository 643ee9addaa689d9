"""``ActingPolicy``: any policy, as a function from rows of a slab to rows of a slab."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from vla_async import keys
from vla_async.collectors.slab import TRAJ_IDS, Key, Leaf, read_texts
from vla_async.policies.base import VLAPolicy
from vla_async.strategies.plain import plain_copy

VERSION_LEAF = Leaf((keys.POLICY_VERSION,), (1,), torch.int64, "decision")
REQUEST_KEY: Key = (keys.REQUEST_KEY,)
TOKENS: Key = (keys.INSTRUCTION_TOKENS,)


class ActingPolicy:
    """A policy on its device, and which leaves it reads and writes.

    Args:
        policy: a :class:`VLAPolicy`, or anything that is called with a TensorDict and writes actions into it.
        leaves: what the envs give, and the actions that they take.
        device: where the policy computes.
        autocast: element type of its matrix products, or None for that of its weights.
        batch_sizes: the sizes that a forward pass may have; a batch is filled up to the next one with copies of its
            first row. None for any size.

    Attributes:
        reads: leaves that are gathered for it.
        writes: leaves that it makes, among them the actions.
        has_value: whether it writes ``"state_value"``, which then is also asked for at the end of a slot.

    Raises:
        ValueError: if it reads what no env gives, or does not write the actions that the envs take, in their shape.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], Any],
        leaves: Sequence[Leaf],
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        self.device, self._autocast, self._sizes = device, autocast, sorted(batch_sizes or [])
        self.policy = policy.to(device).eval() if isinstance(policy, nn.Module) else policy
        self.is_vla = isinstance(policy, VLAPolicy)
        self._tokens: dict[bytes, Tensor] = {}
        self._pinned: dict[Key, Tensor] = {}
        observed = {leaf.key: leaf for leaf in leaves if leaf.role == "observation"}
        self.reads = [observed[key] for key in self._wanted(observed)]
        self.writes = self._probe(observed)
        self.has_value = any(leaf.key == (keys.VALUE,) for leaf in self.writes)
        given = ("collector", keys.GROUP_ID)  # by the envs themselves
        missing = [leaf.key for leaf in leaves if leaf.role == "decision" and leaf.key[0] not in given]
        missing = [key for key in missing if key not in {leaf.key for leaf in self.writes}]
        if missing:
            made = [leaf.key for leaf in self.writes]
            raise ValueError(f"the envs take the actions {missing}, but the policy does not write them; it writes {made}")
        self._check_chunk({leaf.key: leaf.shape for leaf in leaves if leaf.role == "decision"})

    def _check_chunk(self, taken: Mapping[Key, tuple[int, ...]]) -> None:
        """Refuse chunks of another shape than the envs take: one could be taken for fewer actions, or spread over more."""
        made = {leaf.key: leaf.shape for leaf in self.writes}
        if keys.CHUNK in taken and made[keys.CHUNK] != taken[keys.CHUNK]:
            raise ValueError(
                f"the policy writes {keys.CHUNK} as {list(made[keys.CHUNK])} for each env, but the envs take "
                f"{list(taken[keys.CHUNK])} [chunk size, action dimension]; build the policy for these envs, or set "
                "env.chunk_size"
            )

    def _wanted(self, observed: Mapping[Key, Leaf]) -> list[Key]:
        if self.is_vla:
            return [key for key in observed if key[0] == keys.OBSERVATION or key == (keys.INSTRUCTION,)]
        declared = getattr(self.policy, "in_keys", None)
        if declared is None:
            return list(observed)
        wanted = [(key,) if isinstance(key, str) else tuple(key) for key in declared]
        found = [leaf for leaf in observed for key in wanted if leaf[: len(key)] == key]
        absent = [key for key in wanted if not any(leaf[: len(key)] == key for leaf in observed)]
        if absent:
            fix = "for a recurrent state, append a TensorDictPrimer to the env (policy.make_tensordict_primer())"
            raise ValueError(f"the policy reads {absent}, but the envs give only {list(observed)}; {fix}")
        return list(dict.fromkeys(found))

    def _probe(self, observed: Mapping[Key, Leaf]) -> list[Leaf]:
        """What the policy writes, found out with a decision on zeros."""
        zeros = {leaf.key: torch.zeros(1, *leaf.shape, dtype=leaf.dtype) for leaf in self.reads}
        inputs = self._inputs(zeros, [0])
        given = {_tuple(key) for key in inputs.keys(True, True)}
        # a policy may write over what it reads only under "next": that is how it carries a state of its own
        with torch.no_grad():
            outputs = self.forward(inputs)
        found: dict[Key, Tensor] = {
            _tuple(key): value for key, value in outputs.items(True, True) if isinstance(value, Tensor)
        }
        leaves = []
        for key, value in found.items():
            if key[0] == "next":
                if key[1:] not in observed:
                    raise ValueError(
                        f"the policy writes {key}, but the envs give no {key[1:]}; append a TensorDictPrimer to them"
                    )
                leaves.append(Leaf(key[1:], tuple(value.shape[1:]), value.dtype, "observation", carried=True))
            elif key not in given or key in (TOKENS, REQUEST_KEY):
                leaves.append(Leaf(key, tuple(value.shape[1:]), value.dtype, "decision"))
        return leaves

    def _inputs(self, rows: Mapping[Key, Tensor], request_keys: Sequence[int]) -> TensorDict:
        size = len(request_keys)
        source: dict[Key, Any] = {}
        for leaf in self.reads:
            if not leaf.is_text:
                source[leaf.key] = rows[leaf.key]
            elif self.is_vla:
                source[TOKENS] = self._tokenized(rows[leaf.key])
            else:
                source[leaf.key] = read_texts(rows[leaf.key], (size,))
        if self.is_vla:
            source[REQUEST_KEY] = torch.tensor(request_keys).unsqueeze(-1)
        if self.device.type == "cpu":
            return _nested(source, torch.Size([size]))
        return TensorDict(
            {key: _to(value, self.device) for key, value in source.items()}, batch_size=[size], device=self.device
        )

    def _tokenized(self, texts: Tensor) -> Tensor:
        raw = [row.tobytes() for row in texts.numpy()]
        assert isinstance(self.policy, VLAPolicy)
        for text in set(raw) - self._tokens.keys():
            self._tokens[text] = self.policy.tokenize(text.rstrip(b"\0").decode()).cpu()
        return torch.stack([self._tokens[text] for text in raw])

    def forward(self, inputs: TensorDict) -> TensorDictBase:
        """Let the policy decide; returns what it gave back, with all it wrote. To be called where gradients are off."""
        context = nullcontext() if self._autocast is None else torch.autocast(self.device.type, dtype=self._autocast)
        with context:
            outputs = self.policy.act(inputs) if isinstance(self.policy, VLAPolicy) else self.policy(inputs)
        return inputs if outputs is None else outputs

    def decide(
        self,
        gather: Callable[[Leaf, NDArray[np.int64], Tensor | None], Tensor],
        rows: NDArray[np.int64],
        request_keys: Sequence[int],
        least: int = 0,
    ) -> dict[Key, Tensor]:
        """Decide for rows of a slab.

        Args:
            gather: copies a leaf's rows out, into a tensor if one is given.
            rows: int64 ``[B]``.
            request_keys: of each.
            least: the batch is filled up to so many rows, with copies of its first.

        Returns:
            What it wrote, on the CPU, by the keys of :attr:`writes`, each ``[B, ...]``.
        """
        size = len(rows)
        if missing := self._padded(size, least) - size:
            rows, request_keys = np.append(rows, rows[:1].repeat(missing)), [*request_keys, *[request_keys[0]] * missing]
        seen = {leaf.key: gather(leaf, rows, self._staging(leaf, len(rows))) for leaf in self.reads}
        outputs = self.forward(self._inputs(seen, request_keys))
        made = {}
        for leaf in self.writes:
            key = ("next", *leaf.key) if leaf.carried else leaf.key
            value = outputs.get(key)
            made[leaf.key] = value if len(value) == size else value[:size]
        if self.device.type == "cuda":
            made = {key: value.to("cpu", non_blocking=True) for key, value in made.items()}
            torch.cuda.current_stream(self.device).synchronize()
        return made

    def _padded(self, size: int, least: int) -> int:
        """The next allowed batch size."""
        least = max(least, size)
        return next((allowed for allowed in self._sizes if allowed >= least), least)

    def _staging(self, leaf: Leaf, size: int) -> Tensor | None:
        """Pinned memory for a leaf's rows on their way to a GPU."""
        if self.device.type != "cuda" or leaf.is_text:
            return None
        buffer = self._pinned.get(leaf.key)
        if buffer is None or len(buffer) < size:
            self._pinned[leaf.key] = buffer = torch.empty(size, *leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return buffer[:size]


class RandomActions:
    """Draws actions uniformly from what one row of the envs takes.

    Args:
        specs: by key.
    """

    def __init__(self, specs: Mapping[Key, TensorSpec]) -> None:
        self.specs = dict(specs)
        self.in_keys: list[Key] = []

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for key, spec in self.specs.items():
            td.set(key, spec.expand(*td.batch_size, *spec.shape).rand())
        return td


def _nested(source: Mapping[Key, Any], size: torch.Size) -> TensorDict:
    """A TensorDict of leaves that are known to fit, without looking at them again, which takes longer than all the rest."""
    out: dict[str, Any] = {}
    for key, value in source.items():
        level = out
        for name in key[:-1]:
            level = level.setdefault(name, {})
        level[key[-1]] = value
    return _dressed(out, size)


def _dressed(level: dict[str, Any], size: torch.Size) -> TensorDict:
    parts = {name: _dressed(value, size) if isinstance(value, dict) else value for name, value in level.items()}
    made: TensorDict = TensorDict._new_unsafe(parts, batch_size=size)
    return made


def _tuple(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True)


def all_leaves(given: Sequence[Leaf], written: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """What a slab holds: what the envs give, what the policy writes (which counts where both do), and who did it when."""
    merged = {leaf.key: leaf for leaf in given} | {leaf.key: leaf for leaf in written}
    return (*merged.values(), VERSION_LEAF, Leaf(TRAJ_IDS, (), torch.int64, "decision"))


def portable(policy: Any) -> Any:
    """A policy as it can be sent to another process: on the CPU, without what belongs to a trainer."""
    if not isinstance(policy, nn.Module):
        return policy
    policy = plain_copy(policy)
    on_gpu = any(tensor.is_cuda for tensor in [*policy.parameters(), *policy.buffers()])
    portable = copy.deepcopy(policy).cpu() if on_gpu else copy.copy(policy)
    if "_fabric" in portable.__dict__:
        portable.__dict__ = {**portable.__dict__, "_fabric": None, "_fabric_optimizers": []}
    return portable
