"""Stands in for packages that LeRobot imports at its start and that no network needs: data sets, tables, serial ports."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock


class _Absent(types.ModuleType):
    """A module with any attribute, none of which does anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and all in them, where there are none.

    Args:
        packages: their import names.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def do_without(*packages: str) -> None:
    """Let these packages be imported; one that is installed is used."""
    sys.meta_path.append(AbsentPackages(packages))
