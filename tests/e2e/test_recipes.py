"""Every recipe, run for real through the command line: the toy one in full, the simulators' with few steps."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import pytest
import torch

from vla_async.__main__ import main
from vla_async.cli import VLACLI
from vla_async.data import Demonstrations

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def run(subcommand: str, recipe: str, *overrides: str) -> VLACLI:
    return VLACLI([subcommand, "--config", str(RECIPES / recipe), *overrides])


def metrics_of(cli: VLACLI) -> list[dict[str, str]]:
    with (cli.trainer.run.path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_recipe_is_run_here() -> None:
    """A recipe that nobody runs is a recipe that nobody knows to work."""
    here = "".join((Path(__file__).parent / name).read_text() for name in ("test_recipes.py", "test_vla_recipes.py"))
    assert [recipe.name for recipe in RECIPES.glob("*.yaml") if recipe.name not in here] == []


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_a_recipe_says_what_it_takes_and_what_came_of_it(recipe: str) -> None:
    header = [line for line in (RECIPES / recipe).read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header).lower()
    assert "vla-async fit --config recipes/" + recipe in text
    for word in ("hardware:", "time:", "result:"):
        assert word in text, f"{recipe} does not say its {word}"


def test_the_toy_recipe_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From near 0 to at least 0.8: if this fails, reinforcement learning does not work at all."""
    monkeypatch.chdir(tmp_path)
    fit = run("fit", "toy_ppo.yaml")
    validated = [float(row["validate/success_once"]) for row in metrics_of(fit) if row.get("validate/success_once")]
    assert validated[0] <= 0.2
    assert validated[-1] >= 0.8
    tested = run("test", "toy_ppo.yaml", f"--ckpt_path={fit.trainer.run.checkpoints / 'best.ckpt'}").result
    assert tested.success().n == 100
    assert tested.success().rate >= 0.8
    assert (fit.trainer.run.path / "success.png").stat().st_size > 0


def few_steps(recipe: str, episodes: int, *more: str, evaluated: Sequence[str] = ()) -> tuple[VLACLI, VLACLI]:
    """Collect, imitate, improve and evaluate, each for a moment; returns the fit and the test (with further settings)."""
    few = ("--trainer.collect_loop.directory=demos", "--trainer.sft_loop.directory=demos", *more)
    collected = run("collect", recipe, f"--trainer.collect_loop.num_episodes={episodes}", *few).result
    assert collected.episodes == episodes <= collected.attempts
    sft = run("sft", recipe, "--trainer.sft_loop.max_steps=2", "--trainer.sft_loop.batch_size=8", *few)
    before = torch.load(sft.trainer.run.checkpoints / "last.ckpt", weights_only=True)["state_dict"]
    short = ("--trainer.max_steps=1", "--trainer.val_every_n_steps=0", "--trainer.fit_loop.decisions_per_env=4")
    small = ("--trainer.fit_loop.mini_batch_size=4", "--trainer.fit_loop.micro_batch_size=4")
    start = f"--trainer.init_from={sft.trainer.run.checkpoints / 'last.ckpt'}"
    fit = run("fit", recipe, *short, *small, start, "--model.objective.critic_warmup_updates=0", *few)
    after = torch.load(fit.trainer.run.checkpoints / "last.ckpt", weights_only=True)["state_dict"]
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("actor"))
    tested = run("test", recipe, f"--ckpt_path={fit.trainer.run.checkpoints / 'last.ckpt'}", *few, *evaluated)
    return fit, tested


def replay(tested: VLACLI) -> None:
    """A saved episode of a real simulator comes out the same to the last bit, from its file alone, with a video."""
    file = min(tested.trainer.run.trajectories.glob("*/*.pt"))
    assert main(["replay", str(file), "--tolerance=0"]) == 0
    assert file.with_name(f"{file.stem}_replay.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    "recipe",
    ["maniskill_pushcube_sft_ppo.yaml", "maniskill_pickcube_ppo.yaml", "maniskill_pushcube_rgb_sft_ppo.yaml"],
)
def test_a_maniskill_recipe_runs_from_demonstrations_to_videos(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit, tested = few_steps(recipe, 2, "--env.num_envs=2", "--trainer.evaluate_loop.num_episodes=2")
    spec = fit.trainer.policy.env_spec
    assert spec is not None
    assert fit.trainer.state.counters.env_steps == 2 * 4 * spec.chunk_size
    assert tested.result.success().n == 2
    (video,) = tested.result.videos
    assert len(imageio.mimread(video, memtest=False)) == 50
    assert Demonstrations(Path("demos"), spec.chunk_size).spec == spec
    if recipe == "maniskill_pushcube_sft_ppo.yaml":
        replay(tested)


def test_the_libero_recipe_runs_from_demonstrations_to_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real LIBERO with two cameras: a demonstration by the controller, imitation, an update, an evaluation, a video."""
    monkeypatch.chdir(tmp_path)
    few = ("--env.num_envs=1", "--trainer.evaluate_loop.num_episodes=1", "--env.image_size=32")
    fit, tested = few_steps("libero_spatial_ppo.yaml", 1, *few, evaluated=["--env.max_episode_steps=30"])
    assert fit.trainer.policy.env_spec is not None
    assert set(fit.trainer.policy.env_spec.images) == {"image", "wrist_image"}
    assert fit.trainer.state.counters.env_steps == 4 * 5
    assert tested.result.success().n == 1
    assert tested.result.videos[0].stat().st_size > 0
    replay(tested)
