"""What the tests of VLA policies measure on two ranks, all of it in one start of them, as starting them takes long.

In a module of its own because the processes import it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from lightning.fabric import Fabric
from tensordict import TensorDictBase
from torch import Tensor

from tests.policies.test_adapters import RANK_2, make, seen
from vla_async import keys
from vla_async.objectives import PPO
from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.measuring import measure_decision
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.pi0 import Pi0Policy
from vla_async.policies.pi05 import Pi05Policy
from vla_async.policies.smolvla import SmolVLAPolicy
from vla_async.strategies import SizeWeightedDDPStrategy, SizeWeightedFSDPStrategy
from vla_async.strategies.size_weighted import parameters_of, whole

STRATEGIES = {"ddp": SizeWeightedDDPStrategy, "fsdp": SizeWeightedFSDPStrategy}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi0": (Pi0Policy, {}),
    "pi0.5, its VLM frozen, recomputed": (Pi05Policy, {"freeze": "vlm", "gradient_checkpointing": True}),
    "SmolVLA in bfloat16, by LoRA": (SmolVLAPolicy, {"dtype": "bfloat16", "lora": RANK_2, "freeze": "vision"}),
    "GR00T, recomputed": (Gr00tPolicy, {"gradient_checkpointing": True}),
    "OpenVLA-OFT in bfloat16": (OpenVLAOFTPolicy, {"dtype": "bfloat16"}),
}
SPLIT = [[2, 1], [2]]  # rows of the micro-batches of each rank


class Twins:
    """A policy that this rank trains with the other, and one that it trains alone, on the micro-batches of both."""

    def __init__(self, strategy: str, case: str) -> None:
        kind, options = CASES[case]
        self.strategy = STRATEGIES[strategy](timeout=60)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy)
        self.fabric.launch()
        self.policy = make(kind, **{"lora": None, "objective": PPO(), "lr": 1e-2, "detach_value": False} | options)
        self.alone = copy.deepcopy(self.policy)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(0.1 * self.fabric.global_rank)  # ranks that start unlike
        self.module, self.optimizer = self.fabric.setup(self.policy, self.policy.configure_optimizers())
        self.module.mark_forward_method("training_step")
        self.alone_optimizer = self.alone.configure_optimizers()

    def train(self, seed: int) -> dict[str, float]:
        """One optimizer step of both; how far their gradients and then their weights are apart."""
        parts = decisions(self.alone, seed).split([*chain(*SPLIT)])
        first = len(SPLIT[0])
        for part in parts[:first] if self.fabric.global_rank == 0 else parts[first:]:
            output = self.module.training_step(part.clone())
            self.fabric.backward(output.loss, num_samples=output.num_samples)
        self.strategy.normalize(self.optimizer.optimizer)
        total = 0
        for part in parts:
            output = self.alone.training_step(part.clone())
            output.loss.backward()
            total += output.num_samples
        for parameter in parameters_of(self.alone_optimizer):
            parameter.grad = None if parameter.grad is None else parameter.grad / total
        trained = zip(parameters_of(self.optimizer.optimizer), parameters_of(self.alone_optimizer), strict=True)
        found = {"gradients": farthest((parameter.grad, alone.grad) for parameter, alone in trained)}
        for optimizer in (self.optimizer, self.alone_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        weights, expected = self.policy.state_dict(), self.alone.state_dict()
        return found | {"weights": farthest((weights[name], expected[name]) for name in expected)}


def farthest(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    """The largest difference, relative to the tensor that it is in; infinite if one lacks what the other has."""
    largest = 0.0
    for found, expected in pairs:
        if (found is None) != (expected is None):
            return float("inf")
        if found is not None and expected is not None:
            scale = float(expected.abs().max()) or 1.0
            largest = max(largest, float((whole(found) - expected).abs().max()) / scale)
    return largest


def decisions(policy: Any, seed: int) -> TensorDictBase:
    """What a policy decides, with advantages and value targets."""
    batch, generator = policy.act(seen(policy, sum(map(sum, SPLIT)))), torch.Generator().manual_seed(seed)
    for key in (keys.ADVANTAGE, keys.VALUE_TARGET):
        batch[key] = torch.randn(len(batch), 1, generator=generator)
    batch[keys.EXECUTED] = torch.ones(batch[keys.LOG_PROB].shape[:2], dtype=torch.bool)
    batch[keys.EXECUTED][0, -1] = False
    return batch


def measure_case(strategy: str, case: str) -> dict[str, Any]:
    twins, device = Twins(strategy, case), torch.device("cpu")
    found: dict[str, Any] = {"first": twins.train(seed=0)}
    if twins.fabric.global_rank == 0:  # which estimates memory for all
        taken = [measure_decision(policy, device, twins.fabric.autocast(), False) for policy in (twins.policy, twins.alone)]
        found["kept"] = taken[0].kept / taken[1].kept
    found["second"] = twins.train(seed=1)
    twins.strategy.teardown()
    return found


def measure(rank: int) -> dict[str, Any]:
    return {f"{case}, {strategy}": measure_case(strategy, case) for strategy in STRATEGIES for case in CASES}
