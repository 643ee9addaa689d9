"""``Finding``: a plain sentence about a run, and what the rules behind the findings read a run with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from vla_async.monitor.metric import Family
from vla_async.monitor.metric_table import ROLLOUT_SUCCESS_ONCE, SUCCESS_ONCE, UPDATE_S
from vla_async.monitor.metrics import mean
from vla_async.report.run_data import Line, RunData

Kind = Literal["problem", "note", "good"]

WARM_UP = 0.25  # of a run's updates: processes start, buffers fill and code is compiled in them
LEAST_UPDATES = 4  # of the warm-up and after it; of fewer, nothing about the pace can be said
RISE = 0.2  # of success: by less, two validations of 50 episodes may differ by chance
OBJECTIVES = ("ppo", "grpo")  # whose metrics the rules know


@dataclass(frozen=True)
class Finding:
    """One thing that a run's metrics say.

    Attributes:
        kind: ``problem``: something to change; ``note``: something to know; ``good``: something to keep.
        text: a sentence or two, with the figures and, for a problem, the setting to change.
        rule: the condition behind it, with its threshold.
    """

    kind: Kind
    text: str
    rule: str


def settled(run: RunData) -> list[Line]:
    """The updates after the warm-up, at least one of which is left out; none of a run that is too short."""
    number = len(run.updates)
    return run.updates[max(1, int(number * WARM_UP)) :] if number >= LEAST_UPDATES else []


def values(lines: Iterable[Line], name: str) -> list[float]:
    """A metric wherever it was logged and is a number."""
    return [line[name] for line in lines if math.isfinite(line.get(name, math.nan))]


def share(lines: Iterable[Line], name: str) -> float:
    """A share of the time over several updates, in which a long one counts for more; NaN if it was not logged."""
    parts = [(line[name], line.get(UPDATE_S, 1.0)) for line in lines if math.isfinite(line.get(name, math.nan))]
    total = sum(seconds for _, seconds in parts)
    return sum(part * seconds for part, seconds in parts) / total if total > 0.0 else math.nan


def of_objective(lines: Iterable[Line], family: Family) -> list[float]:
    """A metric of the run's objective, whichever that is."""
    kept = list(lines)
    return next((found for name in OBJECTIVES if (found := values(kept, family.of(name)))), [])


def setting(run: RunData, name: str) -> Any:
    """A setting of the run, by the name that messages use: ``env.num_envs``, ``fit_loop.max_staleness``.

    Returns:
        None if it is not known, as of a run without config.yaml, or not set.
    """
    section, *rest = name.split(".")
    start = ["model", "objective"] if section == "objective" else [section]
    value: Any = run.config
    for key in [*(["trainer"] if section.endswith("_loop") else []), *start, *rest]:
        value = value.get("init_args", value) if isinstance(value, dict) else None
        value = value.get(key) if isinstance(value, dict) else None
    return value


def named(run: RunData, name: str) -> str:
    """A setting's name, with its value if that is known: ``fit_loop.max_staleness (now 1)``."""
    value = setting(run, name)
    return name if value is None else f"{name} (now {value})"


def inside(run: RunData, name: str) -> str:
    """The same within brackets: ``fit_loop.max_staleness, now 1``."""
    value = setting(run, name)
    return name if value is None else f"{name}, now {value}"


def learns(run: RunData) -> bool:
    """Whether success rises, as a validation or the training episodes say; what looks odd then does no harm yet."""
    rates = values(run.evaluations, SUCCESS_ONCE.of("validate"))
    trained = values(run.updates, ROLLOUT_SUCCESS_ONCE.of())
    quarter = max(1, len(trained) // 4)
    rises = (rates[-1] - rates[0] if rates else 0.0, mean(trained[-quarter:]) - mean(trained[:quarter]))
    return any(rise >= RISE for rise in rises)


def percent(value: float) -> str:
    """A share for people."""
    return f"{100 * value:.0f} %"


def seconds(value: float) -> str:
    """A short time for people."""
    return f"{value:.1f} s" if value >= 1.0 else f"{1000 * value:.3g} ms"
