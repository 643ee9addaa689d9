"""LoRA (arXiv 2106.09685) through peft: small low-rank additions are trained, what they are added to stays as released.

Only what is trained is published to the replicas and kept by the optimizer, so both become as small as the additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_async.objectives.base import Objective

_ADAPTER = "default"  # peft's name of the only one


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which linear layers get an addition, and of what size.

    Args:
        rank: of each addition.
        alpha: an addition counts ``alpha / rank``.
        dropout: share of an addition's inputs that imitation leaves out. Reinforcement learning has to compute the same
            log-prob in acting and in training, so it takes none.
        targets: the layers by the last parts of their names (``q_proj``, ``mlp.up_proj``); None for all of them.

    Raises:
        ValueError: names the field and the fix.
    """

    rank: int = 32
    alpha: float = 32.0
    dropout: float = 0.0
    targets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"model.lora.rank={self.rank} must be at least 1")
        if not 0.0 < self.alpha < float("inf"):
            raise ValueError(f"model.lora.alpha={self.alpha} must be positive")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.lora.dropout={self.dropout} must lie in [0, 1)")
        if self.targets is not None and (isinstance(self.targets, str) or not self.targets):
            raise ValueError(
                f"model.lora.targets={self.targets!r} must be names of linear layers, such as [q_proj, v_proj], or null"
            )

    @classmethod
    def read(cls, options: Mapping[str, Any] | None, objective: Objective | None = None) -> LoRA | None:
        """What the setting ``lora`` of a policy says; None for none.

        Raises:
            ValueError: if there is no such field, it cannot work, or its dropout cannot be used with an objective.
        """
        if options is None:
            return None
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ValueError(f"model.lora: {unknown} does not exist; there is {', '.join(names)}")
        lora = cls(**options)
        if lora.dropout > 0.0 and objective is not None:
            raise ValueError(
                f"model.lora.dropout={lora.dropout} would make the log-prob of training another than that of acting; set it "
                "to 0 where there is a model.objective"
            )
        return lora


def choose_trained(
    network: nn.Module,
    options: Mapping[str, Any] | None,
    *,
    frozen: Sequence[nn.Module] = (),
    whole: Sequence[nn.Module] = (),
    uncalled: Sequence[nn.Module] = (),
) -> None:
    """Freeze parts of a network and, with the setting ``lora``, all of it but low-rank additions and some parts.

    The additions begin at zero, so the network computes what it did. They are float32 whatever the type of the layers is,
    for a step of training is too small for bfloat16.

    Args:
        network: changed in place. With an addition, its layer ``x`` becomes ``x.base_layer``, ``x.lora_A`` and ``x.lora_B``.
        options: fields of :class:`LoRA`; None for no additions.
        frozen: what stays as it is in either case.
        whole: what gets no additions, but is trained itself.
        uncalled: what can have none, for its weights are read without calling it.

    Raises:
        ValueError: if a target names no layer that may get an addition.
    """
    for part in frozen:
        part.requires_grad_(False)
    if (lora := LoRA.read(options)) is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    apart = {id(module) for part in (*whole, *frozen, *uncalled) for module in part.modules()}
    chosen = _targets(lora, [name for name, part in network.named_modules() if _is_linear(part) and id(part) not in apart])
    alpha: Any = lora.alpha  # peft takes any number, but says it takes an int
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=chosen)
    inject_adapter_in_model(config, network, adapter_name=_ADAPTER)
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for part in whole:
        part.requires_grad_(True)


def _is_linear(module: nn.Module) -> bool:
    """Not of a subclass: what reads its weights without a call would not notice an addition."""
    return type(module) is nn.Linear


def _targets(lora: LoRA, layers: Sequence[str]) -> list[str]:
    """The names of the layers that get an addition, of those that may."""

    def is_named(layer: str, target: str) -> bool:
        return layer == target or layer.endswith(f".{target}")

    targets = lora.targets or []
    unknown = [target for target in targets if not any(is_named(layer, target) for layer in layers)]
    if unknown or not layers:
        there = sorted({layer.rpartition(".")[2] for layer in layers})
        raise ValueError(f"model.lora.targets: no linear layer that is trained has a name like {unknown}; there is {there}")
    return [layer for layer in layers if not targets or any(is_named(layer, target) for target in targets)]


def merged_weights(network: nn.Module) -> dict[str, Tensor]:
    """The state dict of a network with its low-rank additions added up, as if it never had any.

    Tensors that have no addition are those of the network, not copies.
    """
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in _without_adapters(network)}
    for name, part in network.named_modules():
        if hasattr(part, "get_delta_weight"):
            with torch.no_grad():
                weight, delta = merged[f"{name}.weight"], part.get_delta_weight(_ADAPTER)
                merged[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return merged


def _without_adapters(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in network.state_dict().items():
        if ".lora_" not in name:
            yield name, tensor.detach()
