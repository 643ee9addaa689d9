"""``vla-async ablate``: its rows differ in what they name, run for real, and what cannot be compared is refused."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes import wait_until
from tests.faults.test_ends import processes_of_session
from vla_async.__main__ import main
from vla_async.ablation import SWITCHES, ablation_rows, resolve
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
    "nowhere to write": (["--config", RECIPE, "--json=out/f.json"], "--json out/f.json: there is no directory"),
    "a run to resume": (
        ["--config", RECIPE, "--ckpt_path=last"],
        "--ckpt_path resumes a run, but ablate begins new ones; start them from weights: --trainer.init_from",
    ),
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


def test_the_runs_start_from_the_weights_that_the_recipe_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`last` is the newest run of the recipe's name, and the runs of the ablation have others."""
    monkeypatch.chdir(tmp_path)
    few = ["--config", RECIPE, *SMALL, "--trainer.max_steps=1", "--trainer.val_every_n_steps=0"]
    assert main(["fit", *few]) == 0
    (last,) = Path("runs/toy_ppo").glob("*/checkpoints/last.ckpt")
    assert resolve([*few, "--trainer.init_from=last"])["trainer"]["init_from"] == str(last.resolve())


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_an_interrupt_ends_the_row_too_and_keeps_what_was_measured(number: int, to_group: bool, tmp_path: Path) -> None:
    """A row that nobody tells would go on alone, for hours."""
    args = ["ablate", "--config", RECIPE, "--steps=100000", *SMALL, "--trainer.val_every_n_steps=0"]
    command = [sys.executable, "-m", "vla_async", *args]
    environment = os.environ | {"PYTHONPATH": str(Path(RECIPE).parents[1])}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: bool(list(tmp_path.glob("runs/*/*/co-located-1/*/metrics.csv"))), "the first row trains", 120.0)
        os.killpg(process.pid, number) if to_group else process.send_signal(number)
        said, _ = process.communicate(timeout=60.0)
        assert process.returncode == 130
        assert "interrupted; what was measured is in runs/toy_ppo_ablation" in said
        wait_until(lambda: not processes_of_session(process.pid), "no process is left", 30.0)
        (log,) = tmp_path.glob("runs/*/*/co-located-1.log")
        assert "interrupted; resume from" in log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
