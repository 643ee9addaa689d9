"""What the tests of LIBERO share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def libero_modules() -> list[str]:
    """Modules of LIBERO and its simulator that are imported."""
    return [name for name in sys.modules if name.partition(".")[0] in ("libero", "robosuite")]


@pytest.fixture
def fresh_import() -> Iterator[None]:
    """As if LIBERO had not been imported yet; what the test imports of it is forgotten."""
    kept = {name: sys.modules.pop(name) for name in libero_modules()}
    yield
    for name in libero_modules():
        del sys.modules[name]
    sys.modules.update(kept)
