"""Algorithms on kinds of policies that no recipe and no example trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_async import AsyncTrainer
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, EvaluationResult, StreamingFitLoop
from vla_async.objectives import GRPO
from vla_async.policies import TinyVLAPolicy


class Keep(Callback):
    """Keeps the evaluations."""

    def __init__(self) -> None:
        self.results: list[EvaluationResult] = []

    def on_evaluation_end(self, trainer: AsyncTrainer, result: EvaluationResult) -> None:
        self.results.append(result)


@pytest.mark.timeout(600)
def test_grpo_trains_a_token_policy_to_reach_the_target(tmp_path: Path) -> None:
    """Tokens that were sampled otherwise than they are trained on would have the wrong probabilities raised."""
    policy = TinyVLAPolicy(GRPO(group_size=8), head="tokens", num_bins=9, hidden=[64, 64], lr=5e-3)
    loop = StreamingFitLoop(
        fragments_per_update=32,
        update_epochs=4,
        mini_batch_size=128,
        train_async=False,
        streamer=False,
        async_interaction=False,
    )
    envs = ToyEnvs(num_envs=32, batched=True, chunk_size=2, max_episode_steps=10, success_tol=0.25)
    keep = Keep()
    trainer = AsyncTrainer(
        fit_loop=loop,
        evaluate_loop=EvaluateLoop(num_episodes=50),
        max_steps=48,
        val_every_n_steps=48,
        root_dir=tmp_path,
        callbacks=[keep],
    )
    trainer.fit(policy, envs)
    before, after = (result.success().rate for result in keep.results)
    assert after >= before + 0.4, (before, after)
