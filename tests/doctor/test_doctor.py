"""The command: what it looks at, what it prints, and how it ends."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes import ClockEnvs
from vla_async.__main__ import main
from vla_async.doctor import command, simulators
from vla_async.doctor.apart import Ended
from vla_async.doctor.check import Check, to_json, verdict
from vla_async.doctor.recipe import needs_of
from vla_async.envs import EnvSpec

TOY = "recipes/toy_ppo.yaml"
SPEC = EnvSpec(state_dim=4, images={"image": (3, 8, 8)}, chunk_size=2, action_low=(-1.0,), action_high=(1.0,))
STEPPED = json.dumps({"build_s": 1.0, "step_s": 0.1, "spec": SPEC.to_dict(), "blank": []})


def fake_stepping(ended: Ended) -> Any:
    def run(args: list[str], timeout_s: float, data: bytes) -> Ended:
        return ended

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and EGL is not asked."""
    monkeypatch.setattr(command.machine, "processes", lambda: Check("worker processes", "ok", "fake"))
    monkeypatch.setattr(command, "egl_devices", lambda: {0: None})
    run = fake_stepping(Ended(f"noise\n{STEPPED}\n"))
    monkeypatch.setattr(simulators, "stepped", functools.partial(simulators.stepped, run=run))


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_the_toy_recipe_can_run_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All of it is real: the processes, the env's step, the machine."""
    code, said = run_json(capsys, "--recipe", TOY, f"--trainer.root_dir={tmp_path}")
    assert code == 0, said
    assert said["can_run"]
    assert said["recipe"] == TOY
    checks = {check["name"]: check for check in said["checks"]}
    assert set(checks["envs"]) == {"name", "status", "found", "fix", "needed"}
    assert checks["envs"]["status"] == checks["worker processes"]["status"] == "ok"
    assert checks["envs"]["found"].startswith("ToyEnvs: built and reset in")
    assert checks["recipe"]["found"] == "TinyVLAPolicy on ToyEnvs"
    assert "Vulkan" not in checks, "a recipe is told what it needs, and no more"


@pytest.mark.usefixtures("quick")
def test_without_a_recipe_everything_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_json(capsys)
    names = [check["name"] for check in said["checks"]]
    assert names[:4] == ["Python", "packages", "torch", "worker processes"]
    assert {"system libraries", "Vulkan", "toy", "maniskill", "libero", "open files", "ffmpeg"} <= set(names)
    assert not said["recipe"]
    assert code == 0
    assert said["can_run"]


@pytest.mark.usefixtures("quick")
def test_simulators_can_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run_json(capsys, "--skip-simulators")
    assert not {"toy", "maniskill", "libero"} & {
        check["name"] for check in said["checks"] if check["found"] != "not installed"
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--model.objective=null", "model.objective is not set"),
        ("--trainer.accelerator=cuda", "torch sees no CUDA device"),
        ("--trainer.init_from=last", "no run under"),
        ("--trainer.fit_loop.mini_batch_size=99999", "fit_loop.mini_batch_size=99999 is larger"),
        ("--env.task=PushCube-v9", "PushCube-v9"),
    ],
)
def test_a_recipe_that_cannot_start_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, words: str
) -> None:
    """What `fit` would refuse, the doctor does, and it goes on looking."""
    recipe = "recipes/maniskill_pushcube_sft_ppo.yaml" if override.startswith("--env") else TOY
    code, said = run_json(capsys, "--recipe", recipe, f"--trainer.root_dir={tmp_path}", override)
    failed = [check for check in said["checks"] if check["status"] == "fail"]
    assert code == 1
    assert not said["can_run"]
    assert words in failed[0]["found"]
    names = [check["name"] for check in said["checks"]]
    assert "disk" in names
    assert ("envs" in names) is ("PushCube" not in override), "what the recipe says of the machine is looked at all the same"


@pytest.mark.usefixtures("quick")
def test_loggers_of_the_recipe_are_looked_for_and_not_opened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    content = yaml.safe_load(Path(TOY).read_text())
    content["trainer"]["loggers"] = [
        {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": str(tmp_path)}}
    ]
    recipe.write_text(yaml.safe_dump(content))
    code, said = run_json(capsys, "--recipe", str(recipe))
    (check,) = [check for check in said["checks"] if check["name"] == "logger WandbLogger"]
    assert check["status"] == ("ok" if command.software.is_importable("wandb") else "fail")
    assert code == (check["status"] == "fail")
    assert not (tmp_path / "wandb").exists()


def test_a_crashing_simulator_is_one_failed_line() -> None:
    """A segmentation fault in a driver is the most common end of a simulator, and says nothing by itself."""
    run = fake_stepping(Ended("loading\n", "it crashed with SIGSEGV", crashed=True))
    check, spec = simulators.stepped("envs", ClockEnvs(num_envs=1), True, run)
    assert (check.status, check.blocks, spec) == ("fail", True, None)
    assert "SIGSEGV" in check.found
    assert "Vulkan" in check.fix
    later, known = simulators.stepped("envs", ClockEnvs(num_envs=1), True, fake_stepping(Ended(STEPPED, "it crashed", True)))
    assert (later.status, known) == ("warn", SPEC)


def test_what_an_env_says_that_it_lacks_is_passed_on() -> None:
    said = json.dumps({"error": "ManiSkill is not installed: pip install 'vla_async[maniskill]'"})
    check, _ = simulators.stepped("maniskill", ClockEnvs(num_envs=1), False, fake_stepping(Ended(said)))
    assert (check.status, check.found, check.blocks) == ("fail", "ManiSkill is not installed", False)
    assert check.fix == "pip install 'vla_async[maniskill]'"


def test_blank_pictures_are_noticed() -> None:
    """A driver that draws nothing lets a policy train on nothing."""
    said = json.dumps(json.loads(STEPPED) | {"blank": ["image"]})
    check, _ = simulators.stepped("libero", ClockEnvs(num_envs=1), True, fake_stepping(Ended(said)))
    assert (check.status, "image is blank" in check.found) == ("warn", True)


def test_needs_are_those_of_the_loop() -> None:
    """Workers, replicas and the rows of the slab as `fit` counts them."""
    settings = ["fit_loop=StreamingFitLoop", "fit_loop.decisions_per_env=4", "fit_loop.mini_batch_size=64"]
    needs = needs_of(["--config", TOY, *(f"--trainer.{setting}" for setting in settings)])
    assert needs.check.status == "ok", needs.check
    assert (needs.workers, needs.replicas, needs.ranks, needs.processes) == (1, 1, 1, 3)
    assert needs.rows == 2 * 16 * (2 * 4 + 1)
    assert needs.slab_bytes(SPEC) == needs.rows * (3 * 8 * 8 + 4 * 4 + 2 * 4 * 2)
    assert needs.slab_bytes(None) == 0


def test_what_the_last_line_says_follows_from_the_checks() -> None:
    fine, broken = Check("Python", "ok", "3.12"), Check("libero", "fail", "gone", "install it", needed=False)
    assert verdict([fine], None) == "a run can start here"
    assert verdict([fine, broken], "r.yaml") == "r.yaml can start here; what needs one of these cannot: libero"
    bad = Check("disk", "fail", "full", "delete")
    assert verdict([fine, bad, broken], "r.yaml") == "r.yaml cannot start here before these are mended: disk"
    assert to_json([bad], None)["can_run"] is False


@pytest.mark.usefixtures("quick")
def test_the_table_fits_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--skip-simulators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1].startswith("a run can start here")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--recipe", "recipes/no_such.yaml"], "there is no such file"),
        (["--env.num_envs=2"], "without a recipe"),
        (["--recipe", TOY, "--env.num_env=2"], "env.num_env is no setting"),
    ],
)
def test_a_wrong_command_line_is_refused(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *args]) == 1
    assert words in capsys.readouterr().err
