"""The doctor steps the real simulators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from vla_async.doctor.simulators import examples, installed_simulators, stepped


@pytest.mark.timeout(300)
def test_the_simulators_step_and_draw_here() -> None:
    """Both are installed where the tests run; what the doctor says of them decides whether somebody trusts it."""
    chosen = {name: factory for name, factory in examples().items() if name in installed_simulators()}
    assert set(chosen) == {"maniskill", "libero"}
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda name: stepped(name, chosen[name], True), chosen))
    for check, spec in results:
        assert check.status == "ok", check
        assert spec is not None
        assert spec.images["image"] == (3, 64, 64)
