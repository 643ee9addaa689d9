"""The recipes of pretrained policies: the full ones are built, without weights or GPUs; their tiny twins run for real.

A twin is a complete recipe that differs from the full one in sizes only, which is what makes running it say something about
the other.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vla_async import AsyncTrainer
from vla_async.cli import VLACLI
from vla_async.loops import StreamingFitLoop

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
VLA_RECIPES = [
    "libero_pi05_ppo.yaml",
    "libero_gr00t_ppo.yaml",
    "maniskill_pi0_ppo.yaml",
    "maniskill_pi0_grpo.yaml",
    "libero_openvla_oft_grpo.yaml",
]
SIZES = {
    "trainer": "name max_steps val_every_n_steps accelerator strategy num_ranks precision",
    "trainer.fit_loop": "decisions_per_env fragments_per_update mini_batch_size micro_batch_size max_batch_size max_wait_s "
    "placement.mode placement.rollout_devices envs_per_worker",
    "trainer.evaluate_loop": "num_episodes num_envs",
    "trainer.collect_loop": "num_episodes directory",
    "trainer.sft_loop": "max_steps batch_size micro_batch_size directory",
    "env": "num_envs image_size max_episode_steps task_ids render_quality render_gpu_device_id sim_backend render_backend "
    "reward",
    "model": "config pretrained tokenizer dataset value_hidden noise_hidden",
    "model.objective": "critic_warmup_updates group_size outcome filter_equal_groups",
}
"""What a twin may have otherwise: numbers and durations, weights and what comes with them, devices, and a reward even for a
random network, which never succeeds."""


def twin_of(recipe: str) -> str:
    return recipe.replace(".yaml", "_tiny.yaml")


def settings(section: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a recipe by their path, without ``init_args``; the sizes of a network are one leaf."""
    if not isinstance(section, Mapping) or path == "model.config":
        return {path: section}
    leaves: dict[str, Any] = {}
    for name, value in section.items():
        leaves |= settings(value, path if name == "init_args" else f"{path}.{name}".lstrip("."))
    return leaves


@pytest.mark.parametrize("recipe", VLA_RECIPES)
def test_a_twin_differs_in_sizes_only(recipe: str) -> None:
    """Otherwise the twin would run something else than what it stands for."""
    full, tiny = (settings(yaml.safe_load((RECIPES / name).read_text())) for name in (recipe, twin_of(recipe)))
    different = {path for path in full.keys() | tiny.keys() if full.get(path) != tiny.get(path)}
    allowed = {f"{section}.{name}" for section, names in SIZES.items() for name in names.split()}
    assert different - allowed == set()
    assert {"model.pretrained", "model.config", "env.num_envs"} <= different


class Built(VLACLI):
    """Does all that the command line does before anything runs."""

    def _run_subcommand(self, subcommand: str) -> None:
        trainer: AsyncTrainer = self.trainer
        trainer.policy, trainer.env = self.model, self._get(self.config_init, "env")
        trainer.policy.check_env(trainer.env)
        trainer.fit_loop.check(trainer)


@pytest.mark.parametrize("recipe", VLA_RECIPES)
def test_a_full_recipe_is_accepted_on_eight_gpus(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the machine must not meet a refusal; all that can be known without weights and GPUs is checked here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    built = Built(["fit", "--config", str(RECIPES / recipe)])
    loop, env = built.trainer.fit_loop, built.trainer.env
    assert isinstance(loop, StreamingFitLoop)
    assert loop.train_async
    assert built.trainer.objective.correction == "decoupled"  # type: ignore[attr-defined]
    trains = {str(device) for device in built.trainer.ranks.settings.devices}
    acts = set(loop.placement.rollout_devices or [])
    simulates = {getattr(env, "sim_backend", "cpu").replace("physx_", "")} - {"cpu"}
    assert sorted(trains | acts | simulates) == [f"cuda:{index}" for index in range(8)], "not all GPUs have work"
    assert built.model.hparams["pretrained"] is not None


def run(subcommand: str, recipe: str, *overrides: str) -> VLACLI:
    return VLACLI([subcommand, "--config", str(RECIPES / recipe), *overrides])


def saved(cli: VLACLI) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(cli.trainer.run.checkpoints / "last.ckpt", weights_only=True)
    return checkpoint


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names of the weights that differ between two checkpoints."""
    old, new = before["state_dict"], after["state_dict"]
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def check_twin(recipe: str) -> tuple[dict[str, Any], set[str]]:
    """Train, evaluate, resume; the last metrics, and the weights that the resumed update has changed."""
    fit = run("fit", recipe)
    before = saved(fit)
    counters = asdict(fit.trainer.state.counters)
    assert counters == before["counters"]
    assert counters["step"] == 3
    assert counters["optimizer_steps"] >= 3
    last = fit.trainer.run.checkpoints / "last.ckpt"
    tested = run("test", recipe, f"--ckpt_path={last}").result
    assert tested.success().n == 1
    resumed = run("fit", recipe, f"--ckpt_path={last}", "--trainer.max_steps=4")
    with (resumed.trainer.run.path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    after = saved(resumed)
    assert after["counters"]["step"] == int(row["step"]) == 4
    assert after["counters"]["optimizer_steps"] > counters["optimizer_steps"]
    assert after["counters"]["env_steps"] > counters["env_steps"]
    return row, changed(before, after)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["libero_pi05_ppo_tiny.yaml", "libero_gr00t_ppo_tiny.yaml"])
def test_a_flow_policy_trains_in_libero_by_ppo(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cameras, the state and the instruction of real LIBERO; only what makes the actions is trained."""
    monkeypatch.chdir(tmp_path)
    metrics, moved = check_twin(recipe)
    assert float(metrics["ppo/log_prob_gap"]) < 0.1
    assert any(name.startswith("value_head.") for name in moved)
    assert any(name.startswith("network.") for name in moved)
    assert not any(".vlm." in name or ".backbone." in name for name in moved)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["maniskill_pi0_ppo_tiny.yaml", "maniskill_pi0_grpo_tiny.yaml"])
def test_pi0_trains_in_maniskill(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PPO with a critic, and by GRPO without."""
    monkeypatch.chdir(tmp_path)
    metrics, moved = check_twin(recipe)
    assert any(name.startswith("network.model.dit.") for name in moved)
    assert any(name.startswith("exploration.") for name in moved)
    assert not any(".vlm." in name for name in moved)
    assert any(name.startswith("value_head.") for name in moved) == ("ppo" in recipe)
    if "grpo" in recipe:
        assert float(metrics["grpo/equal_groups"]) == 0.0


@pytest.mark.timeout(900)
def test_action_tokens_train_in_libero_by_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of episodes from the same state; all fail, so that steps are made and move nothing."""
    monkeypatch.chdir(tmp_path)
    metrics, moved = check_twin("libero_openvla_oft_grpo_tiny.yaml")
    assert float(metrics["grpo/log_prob_gap"]) < 1e-4
    assert float(metrics["grpo/equal_groups"]) == 1.0
    assert moved == set()
