"""``Finding``: a plain sentence about a run, and the condition that it stands on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["problem", "note", "good"]


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
