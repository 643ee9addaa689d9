"""Settings of several runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_async.report.formats import NOTHING


@dataclass(frozen=True)
class SettingRow:
    """A setting, and its value in each run; a dash where a run has none."""

    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def setting_rows(contents: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """All settings by their full names, in the order in which they are first met.

    Args:
        contents: nested mappings, one for each run.
    """
    flat = [dict(_flat(content)) for content in contents]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    return [SettingRow(name, [settings.get(name, NOTHING) for settings in flat]) for name in names]


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of the innermost settings; what belongs to a class is named without ``init_args``."""
    found: list[tuple[str, str]] = []
    for key, value in content.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            found += _flat(value, name)
        else:
            found.append((name, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)))
    return found
