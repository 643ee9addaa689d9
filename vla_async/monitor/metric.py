"""``Metric`` and ``Family``: names of what is logged, which say what they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_FREE = re.compile(r"<(\w+)>")
_VALUES = {"split": "validate|test", "objective": "[^/]+", "age": r"\d+", "rows": r"\d+", "reason": ".+", "task": ".+"}


class Metric(str):
    """A name under which a number is logged. It is a plain text wherever one is wanted, so it can be a key.

    Attributes:
        unit: of the number.
        reduced: how it is made of what happened in the update, in all processes and on all ranks.
        about: what it says, one sentence.
    """

    unit: str
    reduced: str
    about: str

    def __new__(cls, name: str, unit: str, reduced: str, about: str) -> Metric:
        metric = super().__new__(cls, name)
        metric.unit, metric.reduced, metric.about = unit, reduced, about
        return metric

    def __getnewargs__(self) -> tuple[str, str, str, str]:  # type: ignore[override] # ranks send names to each other
        return str(self), self.unit, self.reduced, self.about

    def labels_of(self, name: str) -> dict[str, str] | None:
        """The free parts of a logged name: none, if it is this one; None if it is another."""
        return {} if name == self else None


@dataclass(frozen=True)
class Family:
    """Names with free parts, for example ``queue/dropped/<reason>``.

    Args:
        pattern: the name; a free part stands in ``<>``, and what may be left out, at the end, in ``[]``.
        unit: of each metric.
        reduced: of each metric.
        about: of each metric.
    """

    pattern: str
    unit: str
    reduced: str
    about: str

    def of(self, *parts: object) -> Metric:
        """The metric with these free parts, in their order; those that may be left out may be missing.

        Raises:
            ValueError: if there are too few or too many.
        """
        needed, _, optional = self.pattern.rstrip("]").partition("[")
        text = needed if len(parts) == needed.count("<") else needed + optional
        if len(parts) != text.count("<"):
            raise ValueError(f"{self.pattern} cannot be made of {parts}")
        values = iter(parts)
        return Metric(_FREE.sub(lambda _: str(next(values)), text), self.unit, self.reduced, self.about)

    def labels_of(self, name: str) -> dict[str, str] | None:
        """The free parts of a logged name, by what they are called, "" where left out; None if it is of no such name."""
        match = self._expression.fullmatch(name)
        return None if match is None else match.groupdict(default="")

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        text = re.escape(self.pattern).replace(r"\[", "(?:").replace(r"\]", ")?")
        return re.compile(_FREE.sub(lambda free: f"(?P<{free[1]}>{_VALUES[free[1]]})", text))

    def __str__(self) -> str:
        return self.pattern
