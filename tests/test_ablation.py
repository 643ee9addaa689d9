"""``vla-async ablate``: its rows differ in what they name, run for real, and what cannot be compared is refused."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_async.__main__ import main
from vla_async.ablation import SWITCHES, Figures, ablation_rows, ablation_table, median, read_figures
from vla_async.loops import SFTLoop

RECIPE = str(Path(__file__).parents[1] / "recipes" / "toy_ppo.yaml")
SPLIT = {"mode": "disaggregated", "rollout_devices": ["cpu"]}
NAMES = ["co-located", "disaggregated", "+ train_async", "+ async_interaction", "+ streamer"]
SMALL = ["--env.num_envs=2", "--trainer.fit_loop.decisions_per_env=2", "--trainer.fit_loop.mini_batch_size=null"]


def settings(overrides: tuple[str, ...]) -> dict[str, str]:
    pairs = (override.partition("=") for override in overrides)
    return {key.removeprefix("--trainer.fit_loop."): value for key, _, value in pairs}


def test_each_row_differs_from_the_one_above_in_the_switch_that_it_names() -> None:
    """Otherwise a row's gain would not be its level's."""
    rows = ablation_rows(SPLIT)
    assert [row.name for row in rows] == NAMES
    assert settings(rows[0].overrides) == {
        "placement": '{"mode": "colocated"}',
        "train_async": "false",
        "async_interaction": "false",
        "streamer": "false",
    }
    changed = []
    for above, row in itertools.pairwise(rows):
        before, after = settings(above.overrides), settings(row.overrides)
        assert before.keys() == after.keys() == set(SWITCHES)
        changed.append([(switch, after[switch]) for switch in SWITCHES if before[switch] != after[switch]])
    assert changed == [
        [("placement", json.dumps(SPLIT))],
        [("train_async", "true")],
        [("async_interaction", "true")],
        [("streamer", "true")],
    ]
    assert len({row.slug for row in rows}) == len(rows)


def test_the_rows_run_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: five processes, their metrics, a table and a file. The recipe's loop is the synchronous one."""
    monkeypatch.chdir(tmp_path)
    few = ["--steps", "4", "--json", "figures.json", *SMALL, "--trainer.evaluate_loop.num_episodes=2"]
    assert main(["ablate", "--config", RECIPE, *few]) == 0
    said = capsys.readouterr().out
    found: dict[str, list[dict[str, Any]]] = json.loads(Path("figures.json").read_text())
    assert list(found) == NAMES
    for name in NAMES:
        assert name in said
        (run,) = found[name]
        assert run["env_steps_per_s"] > 0.0
        assert all(0.0 <= run[f"{role}_idle"] <= 1.0 for role in ("worker", "replica", "trainer"))
        assert run["success"] is not None, "a recipe that validates is validated"
    assert [found[name][0]["staleness_max"] for name in NAMES] == [0.0, 0.0, 1.0, 1.0, 1.0]
    (directory,) = Path("runs/toy_ppo_ablation").iterdir()
    for row in ablation_rows(SPLIT):
        (config,) = (directory / f"{row.slug}-1").glob("*/config.yaml")
        ran = yaml.safe_load(config.read_text())["trainer"]
        assert (ran["max_steps"], ran["val_every_n_steps"], ran["fit_loop"]["init_args"]["decisions_per_env"]) == (4, 4, 2)
        for switch, value in settings(row.overrides).items():
            is_run_with, wanted = ran["fit_loop"]["init_args"][switch], json.loads(value)
            assert is_run_with == ({"rollout_devices": None, **wanted} if switch == "placement" else wanted), row.name


def test_a_row_that_fails_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "--config", RECIPE, "--steps=4", "--trainer.fit_loop.mini_batch_size=9999"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "vla-async: row 'co-located' failed: fit_loop.mini_batch_size=9999 is larger than the global batch"
    )
    assert "co-located-1.log" in said


class OwnLoop(SFTLoop):
    """Something else that calls itself a fit loop."""

    stage = "fit"


STREAMING = "--trainer.fit_loop=StreamingFitLoop"
REFUSED = {
    "no recipe": (["--steps=4"], "ablate needs a recipe, for example: vla-async ablate --config recipes/toy_ppo.yaml"),
    "too few steps": (["--config", RECIPE, "--steps=1"], "--steps: 1 must be a whole number, at least 4"),
    "no number": (["--config", RECIPE, "--repeats=x"], "--repeats: x must be a whole number, at least 1"),
    "a switch of its own": (
        ["--config", RECIPE, "--trainer.fit_loop.streamer=false"],
        "--trainer.fit_loop.streamer is what ablate turns on and off itself; leave it out",
    ),
    "missing recipe": (["--config", "gone.yaml"], "--config gone.yaml: there is no such file"),
    "mistyped key": (["--config", RECIPE, "--trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
    "nothing may be stale": (
        ["--config", RECIPE, STREAMING, "--trainer.fit_loop.max_staleness=0"],
        "trainer.fit_loop.max_staleness=0 lets no rollout run beside training; set it to 1 or more",
    ),
    "another loop": (
        ["--config", RECIPE, f"--trainer.fit_loop={OwnLoop.__module__}.OwnLoop"],
        "trainer.fit_loop=OwnLoop has no levels of asynchrony; ablate needs a StreamingFitLoop",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args, expected = REFUSED[case]
    assert main(["ablate", *args]) == 1
    assert expected in capsys.readouterr().err
    assert not Path("runs").exists()


def test_roles_that_share_their_only_gpu_cannot_be_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU the second row needs another one, and only the user knows which."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["ablate", "--config", RECIPE]) == 1
    assert "'--trainer.fit_loop.placement={mode: disaggregated, rollout_devices: [cuda:1]}'" in capsys.readouterr().err


def test_rates_and_shares_are_those_of_the_updates_after_the_first(tmp_path: Path) -> None:
    """Shares weigh by time, the rate is all env steps over all the time, and what was never logged is no number."""
    path = tmp_path / "metrics.csv"
    lines = [
        {"validate/success_once": 0.1},
        {"time/env_steps_per_s": 1, "env_steps": 10, "elapsed_s": 5, "time/update_s": 5, "trainer/idle_share": 0.9},
        {"time/env_steps_per_s": 1, "env_steps": 20, "elapsed_s": 6, "time/update_s": 1, "trainer/idle_share": 0.8},
        {"time/env_steps_per_s": 1, "env_steps": 30, "elapsed_s": 9, "time/update_s": 3, "trainer/idle_share": 0.0},
    ]
    lines[2]["staleness/max"], lines[3]["staleness/max"], lines[3]["validate/success_once"] = 2, 1, 0.5
    with path.open("w") as file:
        writer = csv.DictWriter(file, sorted({name for line in lines for name in line}))
        writer.writeheader()
        writer.writerows(lines)
    found = read_figures(path, skip=1)
    assert (found.env_steps_per_s, found.update_s, found.trainer_idle) == (5.0, 2.0, pytest.approx(0.2))
    assert (found.staleness_max, found.success) == (2.0, 0.5)
    assert math.isnan(found.replica_idle)
    assert math.isnan(found.last_arrival_to_step_s)


def test_the_table_shows_medians_relative_to_the_first_row() -> None:
    def run(rate: float) -> Figures:
        return Figures(rate, 1.0, 0.1, math.nan, 0.25, 0.5, 0.75, 1.0, 2.0, math.nan)

    results = {"first": [run(100.0), run(90.0), run(500.0)], "second": [run(150.0)]}
    assert median(results["first"]).env_steps_per_s == 100.0
    rows = ablation_table(results, "title").rows
    assert rows[0] == ["first", "100.0", "+0%", "25%", "50%", "75%", "1.00", "2", "–"]
    assert rows[1][1:3] == ["150.0", "+50%"]
