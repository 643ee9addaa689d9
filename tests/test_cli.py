"""The command line: what can be said, that it is the configuration that runs, and the subcommands end to end."""

from __future__ import annotations

import csv
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import vla_async
from tests.conftest import child_processes
from tests.fakes import is_running, reproducible, wait_until
from vla_async.__main__ import HELP, main
from vla_async.callbacks import Checkpoint, Progress, SuccessPlot, TrajectoryRecorder
from vla_async.cli import VLACLI
from vla_async.commands import COMMANDS, SUBCOMMANDS
from vla_async.envs import ToyEnvs
from vla_async.loops import SyncFitLoop
from vla_async.objectives import PPO
from vla_async.policies import TinyVLAPolicy
from vla_async.state import read_checkpoint

RECIPE = str(Path(__file__).parents[1] / "recipes" / "toy_ppo.yaml")
SMALL = """
trainer:
  name: small
  max_steps: 2
  val_every_n_steps: 1
  accelerator: cpu
  fit_loop: {decisions_per_env: 4, update_epochs: 1, mini_batch_size: null}
  evaluate_loop: {num_episodes: 3, num_videos: 0}
model:
  hidden: [8, 8]
env:
  num_envs: 2
  max_episode_steps: 5
"""


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)


@pytest.fixture
def parsed(monkeypatch):
    """Parses and builds, without running."""
    monkeypatch.setattr(VLACLI, "_run_subcommand", lambda cli, subcommand: None)
    return lambda *args: VLACLI([*args])


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as left:
        VLACLI([*args, "--print_config"])
    assert left.value.code == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------------- what can be said


def test_a_printed_config_prints_itself_again(capsys):
    first = printed_config(capsys, "fit", "--config", RECIPE, "--env.num_envs=3")
    Path("printed.yaml").write_text(first)
    assert printed_config(capsys, "fit", "--config", "printed.yaml") == first
    assert yaml.safe_load(first)["env"]["init_args"]["num_envs"] == 3


def test_a_printed_config_names_every_setting(capsys):
    """What a default is must not have to be looked up."""
    config = yaml.safe_load(printed_config(capsys, "fit", "--env=ToyEnvs", "--model=TinyVLAPolicy"))
    loops = {key: config["trainer"][key]["class_path"] for key in config["trainer"] if key.endswith("_loop")}
    assert loops == {
        "fit_loop": "vla_async.loops.SyncFitLoop", "sft_loop": "vla_async.loops.SFTLoop",
        "evaluate_loop": "vla_async.loops.EvaluateLoop", "collect_loop": "vla_async.loops.CollectLoop",
    }  # fmt: skip
    assert config["trainer"]["evaluate_loop"]["init_args"]["num_episodes"] == 50
    assert set(config) == {"trainer", "model", "env", "ckpt_path"}


def test_the_last_config_wins_and_the_command_line_over_all(parsed):
    Path("more.yaml").write_text("trainer: {max_steps: 7, seed: 5}\nenv: {num_envs: 3}\n")
    cli = parsed("fit", "--config", RECIPE, "--config", "small.yaml", "--config", "more.yaml", "--trainer.seed=6")
    trainer, env = cli.trainer, cli.config_init.fit.env
    assert (trainer.max_steps, trainer.seed, trainer.name) == (7, 6, "small")
    assert (env.num_envs, env.max_episode_steps) == (3, 5)
    assert cli.model.hparams["hidden"] == [8, 8]


def test_classes_can_be_named_without_their_module(parsed):
    args = ["--env=ToyEnvs", "--model=TinyVLAPolicy", "--model.objective=PPO", "--model.objective.gamma=0.9"]
    cli = parsed("fit", *args, "--trainer.fit_loop=SyncFitLoop", "--trainer.fit_loop.update_epochs=7")
    assert isinstance(cli.config_init.fit.env, ToyEnvs)
    assert isinstance(cli.model, TinyVLAPolicy)
    assert isinstance(cli.model.objective, PPO)
    assert cli.model.objective.gamma == 0.9
    assert isinstance(cli.trainer.fit_loop, SyncFitLoop)
    assert cli.trainer.fit_loop.update_epochs == 7


def test_settings_may_leave_out_or_name_init_args(parsed):
    args = ["--model.init_args.lr=0.5", "--env.num_envs=2", "--trainer.evaluate_loop.init_args.num_episodes=9"]
    cli = parsed("test", "--config", RECIPE, *args)
    assert cli.model.hparams["lr"] == 0.5
    assert (cli.config_init.test.env.num_envs, cli.trainer.evaluate_loop.num_episodes) == (2, 9)


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_one_config_serves_all_subcommands(parsed, subcommand):
    cli = parsed(subcommand, "--config", RECIPE, "--config", "small.yaml")
    assert cli.trainer.name == "small"


def test_a_callback_can_be_set_and_takes_the_place_of_the_default_one(parsed):
    args = ["--trainer.callbacks+=Checkpoint", "--trainer.callbacks.every_n_steps=5"]
    callbacks = parsed("fit", "--config", RECIPE, *args, "--trainer.callbacks+=Progress").trainer.callbacks
    # whatever the order in which they are given, what the others change is in what Checkpoint saves
    assert [type(callback) for callback in callbacks] == [Progress, SuccessPlot, TrajectoryRecorder, Checkpoint]
    assert callbacks[-1].every_n_steps == 5


def test_a_logger_can_be_added(parsed):
    """Lightning's own, with its settings; ours are added the same way."""
    name = "lightning.fabric.loggers.TensorBoardLogger"
    [logger] = parsed(
        "fit", "--config", RECIPE, f"--trainer.loggers+={name}", "--trainer.loggers.root_dir=board"
    ).trainer.loggers
    assert type(logger).__name__ == "TensorBoardLogger"
    assert logger.root_dir == "board"
    ours = ["--trainer.loggers+=vla_async.monitor.loggers.TensorBoard"]
    ours += ["--trainer.loggers+=vla_async.monitor.prometheus.PrometheusLogger", "--trainer.loggers.port=0"]
    board, prometheus = parsed("fit", "--config", RECIPE, *ours).trainer.loggers
    assert (board.name, prometheus.name, prometheus.port) == ("tensorboard", "prometheus", 0)


def test_the_seed_is_the_trainers(parsed):
    cli = parsed("fit", "--config", RECIPE, "--trainer.seed=11")
    assert cli.trainer.seed == 11
    assert "seed_everything" not in cli.config.fit


def test_the_saved_config_is_without_what_belongs_to_the_command(parsed):
    text = parsed("fit", "--config", RECIPE, "--ckpt_path=last").config_text()
    assert text.startswith(f"# vla-async fit --config {RECIPE} --ckpt_path=last\n")
    assert set(yaml.safe_load(text)) == {"trainer", "model", "env"}


def test_help_is_there_at_once_and_names_every_subcommand(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == HELP
    for subcommand in COMMANDS:
        assert f"  {subcommand} " in HELP
    assert set(VLACLI.subcommands()) == set(SUBCOMMANDS)


def test_the_help_of_a_subcommand_describes_the_settings(capsys):
    with pytest.raises(SystemExit) as left:
        main(["fit", "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: vla-async fit --config FILE")
    assert "--trainer.max_env_steps" in out


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{vla_async.__version__}\n"


# ---------------------------------------------------------------------- how errors end


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    def fit(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("vla_async.trainer.AsyncTrainer.fit", fit)
    return ["fit", "--config", RECIPE]


def test_an_accident_is_shown_with_its_traceback(monkeypatch):
    """What the library did not mean to say must not be dressed up as a message."""
    with pytest.raises(RuntimeError, match="an accident"):
        main(failing(monkeypatch, RuntimeError("an accident")))


def test_a_meant_error_is_one_message_unless_it_is_debugged(monkeypatch, capsys):
    args = ["fit", "--config", RECIPE, "--ckpt_path=gone"]
    assert main(args) == 1
    assert capsys.readouterr().err == "vla-async: ckpt_path='gone' is not a file; give a file, or last or best\n"
    monkeypatch.setenv("VLA_ASYNC_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(args)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/runs/toy"), "/runs/toy: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/runs"), "/runs: Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file could not be written: No space left on device"),
    ],
    ids=["permission", "read-only", "full"],
)
def test_a_disk_that_refuses_is_one_line_whoever_was_writing(monkeypatch, capsys, error, message):
    """It is the user's to mend, and a traceback hides which path it is about."""
    assert main(failing(monkeypatch, error)) == 1
    assert f"vla-async: {message}\n" in capsys.readouterr().err


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch):
    with pytest.raises(ConnectionRefusedError):
        main(failing(monkeypatch, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")))


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    assert main(failing(monkeypatch, KeyboardInterrupt())) == 130
    assert "interrupted" in capsys.readouterr().out


# ---------------------------------------------------------------------- end to end


def rows(path: Path) -> list[dict[str, str]]:
    """The metrics of a run that another one like it has, too."""
    with path.open() as file:
        return [reproducible(row) for row in csv.DictReader(file)]


def newest_run() -> Path:
    return max(Path("runs/small").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def run(*args: str) -> Path:
    before = set(Path("runs/small").iterdir()) if Path("runs/small").is_dir() else set()
    assert main([args[0], "--config", RECIPE, "--config", "small.yaml", *args[1:]]) == 0
    [made] = set(Path("runs/small").iterdir()) - before
    return made


def test_a_run_leaves_its_files_and_its_config_repeats_it(capsys):
    first = run("fit")
    files = {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()}
    saved = {name for name in files if name.startswith("trajectories/toy-tracking/validate_000002_")}
    assert len(saved) == 2, "two failures of the last validation"
    always = {"config.yaml", "environment.json", "metrics.csv", "success.png"}
    assert files == {*always, "checkpoints/last.ckpt", "checkpoints/best.ckpt", *saved}
    out = capsys.readouterr().out
    assert "validate at step 0: success_once" in out
    assert f"run directory: {first}" in out

    assert main(["fit", "--config", str(first / "config.yaml")]) == 0
    [second] = set(Path("runs/small").iterdir()) - {first}
    assert rows(second / "metrics.csv") == rows(first / "metrics.csv")
    without_command = [(path / "config.yaml").read_text().partition("\n")[2] for path in (first, second)]
    assert without_command[0] == without_command[1]


def test_a_run_can_be_resumed_and_evaluated_by_the_names_of_its_checkpoints(capsys):
    run("fit")
    resumed = run("fit", "--ckpt_path=last", "--trainer.max_steps=3")
    assert read_checkpoint(resumed / "checkpoints" / "last.ckpt")["counters"]["step"] == 3
    assert [row["step"] for row in rows(resumed / "metrics.csv")] == ["3"]
    capsys.readouterr()

    tested = run("test", "--ckpt_path=last")
    out = capsys.readouterr().out
    assert "test, policy version 3" in out
    assert "initial weights" not in out
    metrics = rows(tested / "metrics.csv")[-1]
    assert (metrics["test/episodes"], metrics["test/policy_version"]) == ("3", "3")


def test_validation_prints_both_rates_with_n_and_interval(capsys):
    cli = VLACLI(["validate", "--config", RECIPE, "--config", "small.yaml"])
    out = capsys.readouterr().out
    low, high = cli.result.success("success_at_end").interval
    assert cli.result.success().n == 3
    for text in ("success_once", "success_at_end", "toy-tracking", f"[{low:.2f}, {high:.2f}]", "initial weights"):
        assert text in out
    assert f"run directory: {newest_run()}" in out


def test_demonstrations_are_collected_imitated_and_started_from(capsys):
    """The order of a real job: collect, imitate, improve from there."""
    controller = ["--trainer.collect_loop.controller=ToyController", "--trainer.collect_loop.num_episodes=4"]
    run("collect", *controller)
    assert "4 successful episodes of 4 attempts" in capsys.readouterr().out
    imitated = run("sft", "--trainer.sft_loop.max_steps=30")
    assert read_checkpoint(imitated / "checkpoints" / "last.ckpt")["stage"] == "sft"
    assert "step 30/30" in capsys.readouterr().out
    improved = run("fit", "--trainer.init_from=last")
    saved = yaml.safe_load((improved / "config.yaml").read_text())["trainer"]["init_from"]
    assert saved == str(imitated / "checkpoints" / "last.ckpt"), "`last` is another file as soon as this run has ended"
    first = rows(improved / "metrics.csv")[0]
    assert float(first["validate/return"]) > float(rows(run("fit") / "metrics.csv")[0]["validate/return"])


def test_a_policy_that_its_envs_cannot_serve_is_refused_with_one_message(capsys):
    assert main(["fit", "--config", RECIPE, "--model.use_images=true"]) == 1
    assert "model.use_images=true, but the envs have no camera" in capsys.readouterr().err


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_no_process_left():
    args = ["-m", "vla_async", "fit", "--config", RECIPE, "--config", "small.yaml", "--trainer.max_steps=-1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with Path("log").open("w") as log:
        process = subprocess.Popen([sys.executable, *args], stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: "validate at step 3" in Path("log").read_text() or process.poll() is not None, "a step", 120.0)
        workers = child_processes(process.pid)
        process.send_signal(signal.SIGINT)
        code = process.wait(60.0)
    finally:
        process.kill()
        process.wait()
    said = Path("log").read_text()
    assert code == 130, said
    assert "Traceback" not in said
    last = newest_run() / "checkpoints" / "last.ckpt"
    assert f"resume from {last} with --ckpt_path last" in said
    assert read_checkpoint(last)["counters"]["step"] >= 2
    assert workers
    wait_until(lambda: not any(map(is_running, workers)), f"the end of {workers}")


# ---------------------------------------------------------------------- the package


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vla_async; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)), vla_async.AsyncTrainer)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[] <class 'vla_async.trainer.AsyncTrainer'>\n"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'AsyncTrainr'"):
        vla_async.AsyncTrainr  # noqa: B018
    assert "AsyncTrainer" in dir(vla_async)
