"""Flow-matching policies in the fit loops: what they store goes through the slab, and their log-prob comes back from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies.flow_fakes import FakeFlowPolicy
from vla_async import AsyncTrainer
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop, SyncFitLoop
from vla_async.objectives import GRPO, PPO

ENVS = ToyEnvs(num_envs=4, chunk_size=2, max_episode_steps=6, success_tol=0.5, success_steps=1)


class Recorder(Callback):
    """Keeps what each step has logged."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        self.metrics.append(dict(metrics))


def fit(policy: FakeFlowPolicy, loop: SyncFitLoop, root: Path, steps: int) -> list[dict[str, float]]:
    recorder = Recorder()
    trainer = AsyncTrainer(
        fit_loop=loop, max_steps=steps, root_dir=root, num_threads=1, callbacks=[recorder], name="flow", accelerator="cpu"
    )
    trainer.fit(policy, ENVS)
    return recorder.metrics


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("value", ["prefix", "suffix"])
def test_without_a_learning_rate_no_decision_changes_its_probability(tmp_path: Path, noise: Any, value: Any) -> None:
    """A flow that was not stored exactly, or not recomputed as it was sampled, would be a ratio other than 1."""
    torch.manual_seed(0)
    options = {"noise_hidden": [8], "value_hidden": [8]}
    policy = FakeFlowPolicy(PPO(), noise=noise, value=value, lr=0.0, critic_lr=0.0, **options)
    loop = StreamingFitLoop(decisions_per_env=8, update_epochs=2, max_staleness=2)
    metrics = fit(policy, loop, tmp_path, steps=4)
    assert max(row["ppo/log_ratio"] for row in metrics) < 1e-5
    assert max(row["staleness/max"] for row in metrics) >= 1.0, "the loop did not overlap anything"


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
def test_grpo_trains_a_flow_without_a_critic(tmp_path: Path, noise: Any) -> None:
    """GRPO needs no value, and a policy that has none must not be asked for it."""
    torch.manual_seed(0)
    policy = FakeFlowPolicy(GRPO(group_size=2), noise=noise, value=None, lr=1e-3, noise_hidden=[8])
    policy.build(ENVS.make(0).env_spec)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    loop = StreamingFitLoop(fragments_per_update=8, train_async=False, streamer=False, async_interaction=False)
    fit(policy, loop, tmp_path, steps=2)
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"out.weight", "suffix.0.weight", "see.weight"} <= changed
    assert "frozen.weight" not in changed
