"""OpenVLA-OFT and LeRobot's policies in whole runs: their leaves travel through the slab, and they learn."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import make_trainer
from tests.policies.test_openvla_oft import TINY
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop, SyncFitLoop
from vla_async.objectives import GRPO, PPO
from vla_async.policies import VLAPolicy
from vla_async.policies.lerobot import LeRobotPolicy
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.trainer import AsyncTrainer

STATE = {"q01": [-1.0] * 4, "q99": [1.0] * 4}


def make_policy(**options: Any) -> OpenVLAOFTPolicy:
    defaults = {"config": TINY, "max_prompt_tokens": 24, "use_state": True, "state_statistics": STATE}
    return OpenVLAOFTPolicy(**defaults | options)


def envs(num_envs: int) -> ToyEnvs:
    return ToyEnvs(num_envs=num_envs, chunk_size=2, max_episode_steps=4, obs="rgb+state")


def rows(trainer: AsyncTrainer) -> list[dict[str, str]]:
    with (trainer.run.path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def run(root: Path, policy: Any, loop: Any, num_envs: int, steps: int = 2) -> AsyncTrainer:
    trainer = make_trainer(root, fit_loop=loop, max_steps=steps, num_threads=1)
    trainer.fit(policy, envs(num_envs))
    return trainer


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_without_learning_rate_every_ratio_of_a_run_is_one(kind: str, tmp_path: Path) -> None:
    """The replicas' log-probs are the trainer's own, for PPO with a critic and for GRPO, asynchronously."""
    objective = PPO(critic_warmup_updates=0) if kind == "ppo" else GRPO(group_size=2, filter_equal_groups=False)
    policy = make_policy(objective=objective, value=kind == "ppo", lr=0.0, critic_lr=0.0)
    loop = StreamingFitLoop(decisions_per_env=2, update_epochs=2, micro_batch_size=3)
    made = rows(run(tmp_path, policy, loop, num_envs=4))
    assert len(made) == 2
    assert all(abs(float(row[f"{kind}/approx_kl"])) < 1e-9 for row in made)
    assert all(float(row[f"{kind}/log_prob_gap"]) < 1e-5 for row in made)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("openvla_oft.OpenVLAOFTPolicy", {"config": TINY, "betas": [0.8, 0.9], "gripper": "open_is_one"}),
        ("lerobot.LeRobotPolicy", {"pretrained": "folder", "cameras": {"top": "image"}, "noise": "flow_noise", "lr": 0.1}),
    ],
)
def test_a_config_file_sets_every_option(name: str, settings: dict[str, Any]) -> None:
    """The options of the base class included; and what is stored stays plain."""
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(VLAPolicy, "model", subclass_mode=True)
    objective = {"class_path": "vla_async.objectives.PPO"}
    model = {"class_path": f"vla_async.policies.{name}", "init_args": settings | {"objective": objective}}
    made = parser.instantiate(parser.parse_object({"model": model})).model
    assert made.objective is not None
    assert {option: made.hparams[option] for option in settings} == settings
    assert not {"objective", "_instantiator", "_class_path"} & set(made.hparams)


def test_a_resumable_checkpoint_of_a_run_makes_the_same_policy(tmp_path: Path) -> None:
    policy = make_policy(objective=PPO(critic_warmup_updates=0), value=True, lr=1e-3)
    trainer = run(tmp_path, policy, SyncFitLoop(decisions_per_env=2, update_epochs=1), num_envs=2, steps=1)
    again = OpenVLAOFTPolicy.load_from_checkpoint(trainer.run.checkpoints / "last.ckpt")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in policy.state_dict().items())


def test_a_flow_of_lerobot_runs_through_the_loop(tmp_path: Path) -> None:
    """What its log-prob is recomputed from travels through the slab as well."""
    flow = {"num_steps": 2, "lr": 0.0, "critic_lr": 0.0, "cameras": {"top": "image", "wrist": "image"}}
    loader = "tests.policies.test_lerobot.load_flow"
    policy = LeRobotPolicy(PPO(critic_warmup_updates=0), pretrained="stand-in", loader=loader, **flow)
    loop = StreamingFitLoop(decisions_per_env=2, update_epochs=1, micro_batch_size=3)
    made = rows(run(tmp_path, policy, loop, num_envs=2, steps=1))
    assert abs(float(made[0]["ppo/approx_kl"])) < 1e-9
