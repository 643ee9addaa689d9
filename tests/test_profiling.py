"""``vla-async profile``: a short run whose table adds up, and that names who is slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitor.trace_format import check_trace
from vla_async.__main__ import main

RECIPE = str(Path(__file__).parents[1] / "recipes" / "toy_ppo.yaml")


def recipe(step_s: float, envs: int) -> dict[str, Any]:
    """Envs whose steps take so long, and a policy and a training that take next to no time."""
    duration = {"class_path": "vla_async.emulation.Constant", "init_args": {"seconds": step_s}}
    envs_args = {"num_envs": envs, "chunk_size": 2, "step_time": duration, "reset_s": step_s, "max_episode_steps": 4}
    loop = {"decisions_per_env": 2, "update_epochs": 1}
    return {
        "trainer": {
            "name": "slow",
            "accelerator": "cpu",
            "fit_loop": {"class_path": "vla_async.loops.StreamingFitLoop", "init_args": loop},
        },
        "model": {
            "class_path": "vla_async.emulation.EmulatedVLAPolicy",
            "init_args": {"objective": {"class_path": "vla_async.objectives.PPO"}},
        },
        "env": {"class_path": "vla_async.emulation.EmulatedEnvs", "init_args": envs_args},
    }


def test_slow_envs_are_named_and_every_share_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way, with torch's own traces."""
    monkeypatch.chdir(tmp_path)
    Path("slow.yaml").write_text(yaml.safe_dump(recipe(step_s=0.05, envs=2)))
    assert main(["profile", "--config", "slow.yaml", "--steps", "3", "--torch", "true", "--json", "use.json"]) == 0
    said = capsys.readouterr().out
    assert "The envs are the bottleneck: the trainer waits for trajectories" in said
    found = json.loads(Path("use.json").read_text())
    assert found["updates"] == 3
    assert found["seconds_per_update"] >= 0.2, "two decisions of two env steps each take that long"
    assert {name: role["processes"] for name, role in found["roles"].items()} == {
        "env workers": 2,
        "replicas": 1,
        "trainer": 1,
    }
    for name, role in found["roles"].items():
        assert sum(role["shares"].values()) == pytest.approx(1.0), name
        assert min(role["shares"].values()) >= 0.0, name
        for part in role["shares"]:
            assert part in said
    assert found["roles"]["env workers"]["shares"]["resetting"] > 0.0
    (run,) = Path("runs/slow_profile").iterdir()
    assert check_trace(run / "timeline.json")
    assert not list(run.glob("checkpoints/*"))
    for trace in ("trainer_rank_0", "replica_0"):
        assert json.loads((run / "torch" / f"{trace}.json").read_text())["traceEvents"]


REFUSED = {
    "no recipe": (["--steps=4"], "profile needs a recipe, for example: vla-async profile --config recipes/toy_ppo.yaml"),
    "no steps": (["--config", RECIPE, "--steps=0"], "--steps: 0 must be a whole number, at least 1"),
    "no switch": (["--config", RECIPE, "--torch=yes"], "--torch: yes must be true or false"),
    "a setting of its own": (
        ["--config", RECIPE, "--trainer.max_steps=3"],
        "--trainer.max_steps is what profile sets itself (--steps says how many count); leave it out",
    ),
    "a run to resume": (["--config", RECIPE, "--ckpt_path=last"], "start it from weights: --trainer.init_from"),
    "nowhere to write": (["--config", RECIPE, "--json=out/f.json"], "--json out/f.json: there is no directory"),
    "mistyped key": (["--config", RECIPE, "--trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_profiled_is_refused_before_anything_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args, expected = REFUSED[case]
    assert main(["profile", *args]) == 1
    assert expected in capsys.readouterr().err
    assert not Path("runs").exists()
