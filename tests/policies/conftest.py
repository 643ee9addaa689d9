"""Specs and observations for the tiny policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies import TinyVLAPolicy

H, A = 3, 2


@pytest.fixture
def spec() -> EnvSpec:
    return EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H, state_dim=5)


@pytest.fixture
def image_spec() -> EnvSpec:
    images = {"image": (3, 16, 16), "wrist": (1, 24, 20)}
    return EnvSpec((-2.0, 0.0), (2.0, 0.5), chunk_size=H, state_dim=5, images=images)


@pytest.fixture
def make_policy() -> Callable[..., TinyVLAPolicy]:
    def build(spec: EnvSpec, **options: Any) -> TinyVLAPolicy:
        torch.manual_seed(0)
        policy = TinyVLAPolicy(**{"hidden": [32, 32]} | options)
        policy.build(spec)
        with torch.no_grad():  # the first policy hardly depends on what it sees; make it depend
            policy.actor[-1].weight.mul_(100.0)
        return policy

    return build


@pytest.fixture
def observe() -> Callable[..., TensorDict]:
    def build(policy: TinyVLAPolicy, rows: int, instruction: str = "push the cube", with_keys: bool = True) -> TensorDict:
        spec, generator = policy.env_spec, torch.Generator().manual_seed(7)
        assert spec is not None
        td = TensorDict({}, batch_size=[rows])
        for name, shape in spec.images.items():
            td["observation", name] = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=generator)
        if spec.state_dim is not None:
            td[keys.STATE] = torch.randn(rows, spec.state_dim, generator=generator)
        td[keys.INSTRUCTION_TOKENS] = policy.tokenize(instruction).expand(rows, -1).clone()
        if with_keys:
            td[keys.REQUEST_KEY] = torch.arange(100, 100 + rows).unsqueeze(-1)
        return td

    return build
