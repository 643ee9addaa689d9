"""The demo from end to end, on the toy task so that it takes seconds; the recipe's own test runs the simulator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples import demo

RECIPE = """
trainer:
  name: demo
  max_steps: 2
  val_every_n_steps: 1
  collect_loop: {controller: vla_async.envs.controllers.ToyController, num_episodes: 4, directory: demos}
  sft_loop: {directory: demos, max_steps: 5}
  fit_loop: {class_path: vla_async.loops.StreamingFitLoop, init_args: {decisions_per_env: 4, max_staleness: 2}}
  evaluate_loop: {num_episodes: 4}
model:
  class_path: vla_async.policies.TinyVLAPolicy
  init_args: {hidden: [8, 8], objective: {class_path: vla_async.objectives.PPO}}
env:
  class_path: vla_async.envs.ToyEnvs
  init_args: {num_envs: 2}
"""


def test_the_demo_goes_from_demonstrations_to_a_table_of_what_was_gained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this failed, `make demo` would end in an error after minutes of work."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--recipe", str(recipe), "--seeds", "0", "1", "--compare"])
    demo.main()
    said = capsys.readouterr().out
    assert "4 demonstrations from 4 attempts" in said
    assert all(f"toy-tracking, seed {seed}" in said for seed in (0, 1))
    assert all(f"toy-tracking, seed {seed}, synchronous" in said for seed in (0, 1))
    results = sorted(tmp_path.glob("runs/demo/*/result.json"))
    records = [json.loads(result.read_text()) for result in results]
    assert sorted((record["seed"], record["loop"]) for record in records) == [
        (seed, loop) for seed in (0, 1) for loop in ("StreamingFitLoop", "SyncFitLoop")
    ]
    for result, record in zip(results, records, strict=True):
        assert record["baseline"]["n"] == record["after"]["n"] == 4
        assert record["env_steps"] == 2 * 2 * 4
        assert all((tmp_path / video).stat().st_size > 0 for video in record["videos"])
        assert (result.parent / "success.png").stat().st_size > 0
        assert "Findings" in (result.parent / "report.html").read_text()
