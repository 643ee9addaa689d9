"""A policy whose every log-prob is a free parameter, so that each gradient can be told by hand, and decisions for it."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from vla_async import keys
from vla_async.objectives import Objective

B, H, A = 4, 3, 2
LEVELS = ("token", "action", "chunk")


class TablePolicy:
    """Gives back its parameters, row by row of ``"index"``."""

    def __init__(self, seed: int = 0, drift: float = 0.0, has_critic: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.behaviour = torch.randn(B, H, A, generator=generator)
        self.log_prob = (self.behaviour + drift * torch.randn(B, H, A, generator=generator)).requires_grad_()
        self.entropy = torch.rand(B, H, A, generator=generator).requires_grad_()
        self.value = torch.randn(B, 1, generator=generator).requires_grad_()
        self.has_critic = has_critic

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.log_prob, self.entropy, self.value]

    def evaluate(self, td: TensorDict) -> TensorDict:
        index = td["index"]
        out = {keys.LOG_PROB: self.log_prob[index], keys.ENTROPY: self.entropy[index]}
        if self.has_critic:
            out[keys.VALUE] = self.value[index]
        return TensorDict(out, batch_size=td.batch_size)


def make_batch(policy: TablePolicy, executed: list[list[int]] | None = None) -> TensorDict:
    td = TensorDict({"index": torch.arange(B)}, batch_size=[B])
    td[keys.LOG_PROB] = policy.behaviour.clone()
    td[keys.ADVANTAGE] = torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    td[keys.VALUE] = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    td[keys.VALUE_TARGET] = torch.tensor([[2.0], [-1.0], [0.0], [4.0]])
    td[keys.EXECUTED] = torch.tensor(executed or [[1] * H] * B, dtype=torch.bool)
    return td


RAGGED = [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]
VALID = {"token": (3 + 1 + 0 + 2) * A, "action": 3 + 1 + 0 + 2, "chunk": 3}


def gradients(objective: Objective, policy: TablePolicy, batches: list[TensorDict]) -> tuple[float, int, list[torch.Tensor]]:
    outputs = [objective(policy, batch) for batch in batches]  # type: ignore[arg-type]
    loss = sum((output.loss for output in outputs), torch.tensor(0.0))
    grads = torch.autograd.grad(loss, policy.parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, policy.parameters, strict=True)]
    return loss.item(), sum(output.num_samples for output in outputs), filled
