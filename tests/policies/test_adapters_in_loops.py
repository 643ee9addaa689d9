"""LoRA in asynchronous runs: the replicas act on the additions that were trained, and get nothing else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import make_trainer
from tests.policies.vla_fakes import randomize, tiny_pi0_config
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import PPO
from vla_async.policies.pi0 import Pi0Policy

ENVS = ToyEnvs(num_envs=2, chunk_size=2, max_episode_steps=8, obs="rgb+state")


class Published(Callback):
    """Notes what is published, and waits each time until the replicas have proved that they hold it."""

    def __init__(self) -> None:
        self.checksums: list[int] = []

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        publisher = trainer.fit_loop._fleet.publisher
        publisher.confirm()
        assert set(publisher._held.values()) == {trainer.state.counters.step}
        self.names, self.nbytes = publisher.names, publisher.nbytes
        self.checksums.append(publisher._checksum)


def run(root: Path, lr: float, **loop: Any) -> tuple[Pi0Policy, Published, list[dict[str, float]]]:
    torch.manual_seed(0)
    policy = Pi0Policy(
        PPO(critic_warmup_updates=0),
        config=tiny_pi0_config(),
        num_steps=2,
        lora={"rank": 2},
        lr=lr,
        critic_lr=lr,
        value_hidden=[8],
    )
    policy.build(ENVS.make(0).env_spec)
    randomize(policy)
    published = Published()
    options = {"decisions_per_env": 4, "update_epochs": 1} | loop
    trainer = make_trainer(root, fit_loop=StreamingFitLoop(**options), max_steps=3, num_threads=1, callbacks=[published])
    trainer.fit(policy, ENVS)
    with (trainer.run.path / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return policy, published, rows


def test_replicas_act_on_the_weights_of_the_update(tmp_path: Path) -> None:
    """A sync that carried the frozen base alone would leave them at the first policy: their log-probs would give it away."""
    before = Pi0Policy(config=tiny_pi0_config(), lora={"rank": 2}, value_hidden=[8])
    before.build(ENVS.make(0).env_spec)
    randomize(before)
    in_turns = {"train_async": False, "streamer": False, "async_interaction": False}
    policy, published, rows = run(tmp_path, 3e-2, **in_turns)
    assert len(rows) == len(set(published.checksums)) == 3, "each update has published other weights"
    first = dict(before.named_parameters())
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, first[name])}
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert any(".lora_" in name for name in moved)
    assert moved <= trained, "the base stays"
    assert set(published.names) - set(dict(policy.named_buffers())) == trained
    assert all(row["ppo/log_prob_gap"] < 1e-4 for row in rows), "the replicas decided with the trainer's own weights"


@pytest.mark.parametrize("streamer", [True, False])
def test_without_learning_rate_no_ratio_leaves_one(tmp_path: Path, streamer: bool) -> None:
    """Additions that act and evaluate compute differently would be a ratio other than 1."""
    _, _, rows = run(tmp_path, 0.0, max_staleness=2, update_epochs=2, streamer=streamer)
    assert all(row["ppo/log_ratio"] < 1e-5 for row in rows)
