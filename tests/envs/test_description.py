"""Env factories as plain values, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes import ClockEnvs
from vla_async.emulation import Constant, EmulatedEnvs
from vla_async.envs import EnvFactory, LiberoEnvs, ManiSkillEnvs, ToyEnvs
from vla_async.envs.description import describe, factory_of

FACTORIES: list[EnvFactory] = [
    ToyEnvs(num_envs=3, obs="rgb+state"),
    ManiSkillEnvs(
        task="StackCube-v1", obs="rgb", cameras=["hand_camera", "base_camera"], env_kwargs={"sim_config": {"a": 1}}
    ),
    LiberoEnvs(task_ids=[2, 3], render_gpu_device_id=[0, 1]),
    EmulatedEnvs(step_time=Constant(0.25)),
    ClockEnvs(names=("a", "b")),
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: type(factory).__name__)
def test_a_factory_comes_back_as_it_was(factory: EnvFactory) -> None:
    """Through JSON, so that nothing but plain values is in it; lists and tuples mean the same here."""
    description = json.loads(json.dumps(describe(factory)))
    again = factory_of(description)
    assert type(again) is type(factory)
    assert describe(again) == description
    assert again.task_names == factory.task_names


@dataclass(kw_only=True)
class Odd(ClockEnvs):
    call: Callable[[], int] = int


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"class_path": "nowhere.Envs", "init_args": {}}, "the class nowhere.Envs is not there .No module named 'nowhere'"),
        ({"class_path": "vla_async.envs.ToyEnv", "init_args": {}}, r"the class vla_async.envs.ToyEnv is not there"),
        ({"class_path": "Envs", "init_args": {}}, "the class Envs is not there"),
        ({"class_path": "os.system", "init_args": {}}, "os.system is no dataclass"),
        ({"class_path": "vla_async.emulation.Constant", "init_args": {"seconds": 1.0}}, "is no EnvFactory, but a Constant"),
        (
            {"class_path": "vla_async.envs.ToyEnvs", "init_args": {"colour": 1}},
            "does not take its recorded settings: .*colour",
        ),
        ({"class_path": "vla_async.envs.ToyEnvs", "init_args": {"num_envs": 0}}, "env.num_envs=0 must be at least 1"),
    ],
)
def test_what_cannot_be_made_is_named(description: dict[str, Any], message: str) -> None:
    """A file may come from a machine that has more installed, or another version."""
    with pytest.raises(ValueError, match=message):
        factory_of(description)


def test_what_cannot_be_written_down_is_named() -> None:
    with pytest.raises(ValueError, match=r"env.call is a type, which cannot be written down"):
        describe(Odd())
