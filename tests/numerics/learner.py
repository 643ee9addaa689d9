"""The tiny policy, trajectories for it, and what a fit loop does with them, as plainly as possible."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from tensordict import TensorDict
from torch import Tensor

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.objectives import PPO, Objective
from vla_async.policies import TinyVLAPolicy
from vla_async.strategies import SizeWeightedSingleDeviceStrategy

N, T, H, A = 4, 5, 3, 2
SPEC = EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H, state_dim=4)


def make_policy(
    head: str = "gaussian", weight_decay: float = 0.0, lr: float = 1e-2, algorithm: type[Objective] = PPO, **objective: Any
) -> TinyVLAPolicy:
    torch.manual_seed(0)
    policy = TinyVLAPolicy(algorithm(**objective), hidden=[16], head=head, lr=lr, weight_decay=weight_decay)
    policy.build(SPEC)
    return policy


def make_rollout(policy: TinyVLAPolicy, seed: int = 0) -> TensorDict:
    """Random trajectories ``[N, T]``, acted on one column at a time, as a rollout does."""
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({}, batch_size=[N, T])
    td[keys.STATE] = torch.randn(N, T, 4, generator=generator)
    td[keys.INSTRUCTION_TOKENS] = policy.tokenize("move there").expand(N, T, -1).clone()
    td[keys.REQUEST_KEY] = torch.arange(N * T).reshape(N, T, 1) + 1000 * seed
    td = torch.stack([policy.act(td[:, t].clone()) for t in range(T)], dim=1)
    td[keys.STEP_REWARDS] = torch.randn(N, T, H, generator=generator)
    length = torch.randint(1, H + 1, (N, T, 1), generator=generator)
    td[keys.DONE] = length < H
    td[keys.TERMINATED] = td[keys.DONE] & (torch.rand(N, T, 1, generator=generator) < 0.5)
    td[keys.EXECUTED] = torch.arange(H) < length
    td[keys.NEXT_VALUE] = torch.randn(N, T, 1, generator=generator)
    return td


class Learner:
    """What a fit loop does with one global batch, as plainly as possible."""

    def __init__(self, policy: TinyVLAPolicy) -> None:
        self.policy = policy
        self.fabric = Fabric(accelerator="cpu", strategy=SizeWeightedSingleDeviceStrategy(device="cpu"))
        self.module, self.optimizer = self.fabric.setup(policy, policy.configure_optimizers())

    def accumulate(self, parts: list[TensorDict]) -> None:
        for part in parts:
            output = self.module.training_step(part)
            self.fabric.backward(output.loss, num_samples=output.num_samples)

    def step(self, parts: list[TensorDict]) -> Tensor:
        """One optimizer step; returns the gradient it was made with."""
        self.accumulate(parts)
        self.fabric.clip_gradients(self.module, self.optimizer, max_norm=1e9)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters()]
        gradient = torch.cat([g.flatten() for g in grads]).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradient
