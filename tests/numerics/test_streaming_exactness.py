"""The asynchronous loop with everything turned off *is* the synchronous one, and streaming changes no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import reproducible
from vla_async import AsyncTrainer
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop, SyncFitLoop
from vla_async.objectives import PPO
from vla_async.policies import TinyVLAPolicy

STEPS = 20


class Recorder(Callback):
    """Keeps what each step has logged."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        self.metrics.append(dict(metrics))


def fit(loop: SyncFitLoop, root: Path, *, lr: float = 1e-3, steps: int = STEPS) -> tuple[dict[str, Tensor], Recorder]:
    """Train a small policy; returns its weights and what was logged."""
    torch.manual_seed(0)
    policy = TinyVLAPolicy(hidden=[32], lr=lr, objective=PPO())
    # horizon 6 and success: fragments hold truncated and terminated episodes, and end inside others
    envs = ToyEnvs(num_envs=4, chunk_size=2, max_episode_steps=6, success_tol=0.5, success_steps=1)
    recorder = Recorder()
    trainer = AsyncTrainer(
        fit_loop=loop, max_steps=steps, root_dir=root, num_threads=1, callbacks=[recorder], name="exact", accelerator="cpu"
    )
    trainer.fit(policy, envs)
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}, recorder


def off(**settings: Any) -> StreamingFitLoop:
    return StreamingFitLoop(**({"train_async": False, "streamer": False, "async_interaction": False} | settings))


@pytest.mark.parametrize("mini_batch_size", [None, 12])
def test_with_everything_off_it_is_the_synchronous_loop_bit_for_bit(tmp_path: Path, mini_batch_size: int | None) -> None:
    """The same episodes, the same noise, the same advantages, the same order: the baseline is the same algorithm."""
    common: dict[str, Any] = {"decisions_per_env": 8, "update_epochs": 2, "mini_batch_size": mini_batch_size}
    plain, logged = fit(SyncFitLoop(**common), tmp_path)
    streaming, also_logged = fit(off(**common), tmp_path)
    for name, tensor in plain.items():
        assert torch.equal(tensor, streaming[name]), name
    for before, after in zip(logged.metrics, also_logged.metrics, strict=True):
        for name in reproducible(before):
            assert before[name] == after[name], name


def test_streaming_an_update_gives_the_weights_that_collecting_it_first_gives(tmp_path: Path) -> None:
    common: dict[str, Any] = {"decisions_per_env": 8, "update_epochs": 2}
    collected, _ = fit(off(**common), tmp_path)
    streamed, _ = fit(off(**common, streamer=True, micro_batch_size=5), tmp_path)
    for name, tensor in collected.items():
        scale = max(float(tensor.abs().max()), 1e-3)
        assert float((tensor - streamed[name]).abs().max()) <= 1e-6 * scale * STEPS, name


def test_without_a_learning_rate_no_decision_changes_its_probability(tmp_path: Path) -> None:
    """Rollouts overlap with training, so a ratio other than 1 is a difference between replica and trainer."""
    loop = StreamingFitLoop(decisions_per_env=8, update_epochs=2, max_staleness=2)
    _, recorder = fit(loop, tmp_path, lr=0.0, steps=6)
    assert max(metrics["ppo/log_ratio"] for metrics in recorder.metrics) < 1e-5
    assert max(metrics["staleness/max"] for metrics in recorder.metrics) >= 1.0, "the loop did not overlap anything"
