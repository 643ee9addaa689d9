"""What is refused of a flow-matching policy's options and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_async.envs.base import EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.optimizers import check_optimizer


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a flow-matching model.

    Attributes:
        horizon: H', the actions that it makes; the first H of them are executed.
        action_dim: A', the dimensions of each; the first A are the env's.
        prefix_dim: D of ``Prefix.features``.
        suffix_dim: D of the suffix features; None if ``velocity_and_features`` gives none.
    """

    horizon: int
    action_dim: int
    prefix_dim: int
    suffix_dim: int | None = None


def check_options(options: Mapping[str, Any], objective: Objective | None) -> None:
    """Refuse values that cannot work.

    Raises:
        ValueError: names the field, the value and the fix.
    """

    def check(name: str, valid: bool, fix: str) -> None:
        if not valid:
            raise ValueError(f"model.{name}={options[name]!r} {fix}")

    check("num_steps", options["num_steps"] >= 1, "must be at least 1")
    check("noise", options["noise"] in ("flow_sde", "flow_noise", "ode"), "is unknown: choose flow_sde, flow_noise or ode")
    explores = options["noise"] != "ode" or objective is None
    check("noise", explores, "has no log-prob for model.objective to train with; choose flow_sde or flow_noise")
    check("noise_level", 0.0 < options["noise_level"] < math.inf, "must be positive")
    limits = options["noise_std"]
    in_order = len(limits) == 2 and 0.0 < limits[0] < limits[1] < math.inf
    check("noise_std", in_order, "must be two positive limits, the lower one first, for example [0.08, 0.16]")
    check("value", options["value"] in ("prefix", "suffix", None), "is unknown: choose prefix, suffix or null")
    for name in ("noise_hidden", "value_hidden"):
        check(name, all(width >= 1 for width in options[name]), "must be positive widths, for example [128, 64]")
    check_optimizer(check, options)


def check_fit(shape: ModelShape, spec: EnvSpec, value: str | None) -> None:
    """Refuse envs whose chunks the model cannot make, and a critic that it cannot feed.

    Raises:
        ValueError: names the sizes and the fix.
    """
    if spec.chunk_size > shape.horizon:
        raise ValueError(
            f"env.chunk_size={spec.chunk_size} is longer than the {shape.horizon} actions that the model makes; shorten it"
        )
    if spec.action_dim > shape.action_dim:
        raise ValueError(
            f"the envs take {spec.action_dim} action dimensions, but the model makes {shape.action_dim}; "
            "choose a wider model, or another env.control_mode"
        )
    if value == "suffix" and shape.suffix_dim is None:
        raise ValueError("model.value='suffix', but the model gives no suffix features; choose prefix or null")
