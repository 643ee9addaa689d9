"""A flow-matching policy with all that a real one has, in a few hundred parameters, and observations for it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.encoders import hash_words, mlp
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape, Prefix

H, A, HORIZON, MODEL_DIM, WIDTH = 3, 2, 5, 4, 16
SPEC = EnvSpec((-2.0, 0.0), (2.0, 0.5), chunk_size=H, state_dim=5)


class FakeFlowPolicy(FlowMatchingPolicy):
    """Longer and wider than what the envs take, with padding in its prefix, and suffix features if asked for."""

    def __init__(self, objective: Objective | None = None, has_suffix: bool = True, **flow: Any) -> None:
        super().__init__(objective, **flow)
        self.save_hyperparameters({"has_suffix": has_suffix})

    def build_model(self, spec: EnvSpec) -> ModelShape:
        assert spec.state_dim is not None
        self.words, self.see = nn.Embedding(64, WIDTH), nn.Linear(spec.state_dim, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.suffix = mlp([2 * WIDTH, WIDTH, WIDTH], output_gain=1.0)
        self.into, self.out = nn.Linear(MODEL_DIM + 1, WIDTH), nn.Linear(WIDTH, MODEL_DIM)
        self.places = nn.Parameter(torch.randn(HORIZON, WIDTH))
        return ModelShape(HORIZON, MODEL_DIM, WIDTH, WIDTH if self.hparams["has_suffix"] else None)

    def tokenize(self, instruction: str) -> Tensor:
        return hash_words(instruction, 64, 6)

    def prefix(self, td: TensorDictBase) -> Prefix:
        words = td[keys.INSTRUCTION_TOKENS]
        tokens = torch.cat([self.see(td[keys.STATE]).unsqueeze(1), self.words(words)], dim=1)
        mask = nn.functional.pad(words != 0, (1, 0), value=True)
        read = self.frozen((tokens * mask.unsqueeze(-1)).sum(1))
        return Prefix(tokens, mask, cache={"read": read})

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self._run(prefix, x_t, t)[0]

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        velocity, features = self._run(prefix, x_t, t)
        return velocity, features if self.hparams["has_suffix"] else None

    def _run(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        time = t[:, None, None].expand(-1, x_t.shape[1], 1)
        inputs = torch.tanh(self.into(torch.cat([x_t, time], dim=-1)) + self.places)
        read = (prefix.cache["read"].unsqueeze(1) + inputs.mean(1, keepdim=True)).expand_as(inputs)
        features = torch.tanh(self.suffix(torch.cat([inputs, read], dim=-1)))
        return self.out(features), features


def make_flow(spec: EnvSpec = SPEC, **options: Any) -> FakeFlowPolicy:
    """The policy, built, always with the same weights."""
    torch.manual_seed(0)
    policy = FakeFlowPolicy(**{"noise_hidden": [8], "value_hidden": [8]} | options)
    policy.build(spec)
    return policy


def observe(policy: FakeFlowPolicy, rows: int, with_keys: bool = True) -> TensorDict:
    """Observations, the same first rows for any number of them; every other instruction is shorter."""
    generator = torch.Generator().manual_seed(7)
    texts = [["push the red cube", "push"][row % 2] for row in range(rows)]
    td = TensorDict({}, batch_size=[rows])
    td[keys.STATE] = torch.randn(rows, 5, generator=generator)
    td[keys.INSTRUCTION_TOKENS] = torch.stack([policy.tokenize(text) for text in texts])
    if with_keys:
        td[keys.REQUEST_KEY] = torch.arange(100, 100 + rows).unsqueeze(-1)
    return td
