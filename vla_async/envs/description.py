"""An env factory as plain values, in the form that it has in config.yaml, and back."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_async.envs.base import EnvFactory


def describe(factory: EnvFactory) -> dict[str, Any]:
    """The class and the settings of a factory, as ``class_path`` and ``init_args`` of plain values.

    Raises:
        ValueError: if a setting is neither plain nor a dataclass; names it.
    """
    description: dict[str, Any] = _plain(factory, "env")
    return description


def factory_of(description: Mapping[str, Any]) -> EnvFactory:
    """The factory that a description is of.

    Raises:
        ValueError: if its class, or that of one of its settings, is not there or is of another kind; or a setting is wrong.
    """
    factory = _made(description)
    if not isinstance(factory, EnvFactory):
        raise ValueError(f"{description['class_path']} is no EnvFactory, but a {type(factory).__name__}")
    return factory


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{position}]") for position, item in enumerate(value)]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be written down as plain values")
    given = [item.name for item in dataclasses.fields(value) if item.init]
    return {
        "class_path": f"{type(value).__module__}.{type(value).__qualname__}",
        "init_args": {item: _plain(getattr(value, item), f"{name}.{item}") for item in given},
    }


def _made(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"class_path", "init_args"}:
        kind = _class_of(value["class_path"])
        settings = {name: _made(item) for name, item in value["init_args"].items()}
        try:
            return kind(**settings)
        except TypeError as error:
            raise ValueError(f"{value['class_path']} does not take its recorded settings: {error}") from error
    if isinstance(value, Mapping):
        return {name: _made(item) for name, item in value.items()}
    return [_made(item) for item in value] if isinstance(value, list) else value


def _class_of(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the class {path} is not there ({error}); install what defines it, or start from the directory of its module"
        ) from error
    if not dataclasses.is_dataclass(found) or not isinstance(found, type):
        raise ValueError(f"{path} is no dataclass, as an env and its settings are")
    return found
