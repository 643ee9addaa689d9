"""Sizes of a network's parts, by the names of transformers' configurations, which would take any other name in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def check_fields(part: str, sizes: Mapping[str, Any], kind: type[Any]) -> None:
    """Refuse sizes that a configuration does not know.

    Args:
        part: of ``model.config``.
        sizes: by field.
        kind: a configuration of transformers.

    Raises:
        ValueError: names the part and the fields.
    """
    unknown = sorted(set(sizes) - {known.name for known in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"model.config: {part} has fields {unknown} that {kind.__name__} does not know")
