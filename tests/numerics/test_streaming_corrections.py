"""Each correction for the age of the data trains in the streaming loop, and changes nothing where there is no age."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import tiny
from tests.loops.streaming_fakes import balance, fit
from vla_async.envs import ToyEnvs
from vla_async.objectives import GRPO, PPO

TOY: dict[str, Any] = {"num_envs": 4, "chunk_size": 2, "max_episode_steps": 6, "success_tol": 0.5, "success_steps": 1}
LOOP: dict[str, Any] = {"decisions_per_env": 4, "update_epochs": 2, "max_staleness": 2, "envs_per_worker": 2}
PPO_CORRECTIONS = ["none", "truncated_is", "decoupled", "vtrace"]
OBJECTIVES = [(PPO, name) for name in PPO_CORRECTIONS] + [(GRPO, name) for name in PPO_CORRECTIONS[:-1]]


def objective(kind: Any, correction: str) -> Any:
    return kind(correction=correction, **({"group_size": 4} if kind is GRPO else {}))


@pytest.mark.parametrize("mini_batch_size", [None, 5])
@pytest.mark.parametrize("streamer", [True, False])
@pytest.mark.parametrize(("kind", "correction"), OBJECTIVES)
def test_a_correction_trains(
    kind: Any, correction: str, streamer: bool, mini_batch_size: int | None, tmp_path: Path
) -> None:
    """Whatever proximal log-prob it needs is there when it is needed, and its weights are told."""
    torch.manual_seed(0)
    policy = tiny(objective=objective(kind, correction), lr=3e-3)
    settings = LOOP | {"streamer": streamer, "mini_batch_size": mini_batch_size, "micro_batch_size": 3}
    trainer, steps = fit(tmp_path, policy, ToyEnvs(**TOY), max_steps=5, **settings)
    prefix = kind.prefix
    optimizer_steps = trainer.state.counters.optimizer_steps
    assert optimizer_steps == 10 if mini_batch_size is None else optimizer_steps > 10
    losses = [metrics[f"{prefix}/loss"] for metrics in steps.values() if f"{prefix}/loss" in metrics]
    assert losses
    assert all(map(math.isfinite, losses))
    assert (f"{prefix}/importance_weight" in steps[5]) == (correction != "none")
    assert all(balance(metrics) for metrics in steps.values())


@pytest.mark.parametrize("mini_batch_size", [None, 5])
@pytest.mark.parametrize(("kind", "correction"), OBJECTIVES)
def test_without_a_learning_rate_every_ratio_and_every_weight_is_one(
    kind: Any, correction: str, mini_batch_size: int | None, tmp_path: Path
) -> None:
    policy = tiny(objective=objective(kind, correction), lr=0.0)
    _, steps = fit(tmp_path, policy, ToyEnvs(**TOY), max_steps=4, **(LOOP | {"mini_batch_size": mini_batch_size}))
    assert max(metrics[f"{kind.prefix}/log_ratio"] for metrics in steps.values()) < 1e-5
    weights = [metrics.get(f"{kind.prefix}/importance_weight", 1.0) for metrics in steps.values()]
    assert weights == pytest.approx([1.0] * 4, abs=1e-5)
    assert max(metrics[f"{kind.prefix}/clip_fraction"] for metrics in steps.values()) == 0.0
