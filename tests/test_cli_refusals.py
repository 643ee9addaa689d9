"""Wrong command lines and configurations: each is refused before anything starts, naming the key and the choices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vla_async.cli import VLACLI
from vla_async.commands import COMMANDS
from vla_async.policies import VLAPolicy
from vla_async.refusals import ConfigError, check_command_line, explain

RECIPE = str(Path(__file__).parents[1] / "recipes" / "toy_ppo.yaml")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "runs").exists(), "a refused command made a run directory"


def refusal(*args: str) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        VLACLI(args)
    return str(caught.value)


ARGUMENTS = {
    "mistyped trainer key": (["--trainer.max_step=3"], "trainer.max_step is no setting; did you mean trainer.max_steps?"),
    "the choices of trainer": (["--trainer.max_step=3"], "settings of trainer: fit_loop, sft_loop, evaluate_loop"),
    "mistyped policy key": (["--model.hiden=3"], "model.hiden is no setting of TinyVLAPolicy; did you mean model.hidden?"),
    "a setting that a class inherits": (["--model=Pi0Policy", "--model.num_stepz=4"], "did you mean model.num_steps?"),
    "the choices of a policy": (["--model.hiden=3"], "settings of TinyVLAPolicy: objective, hidden, head"),
    "mistyped env key": (["--env.num_env=3"], "env.num_env is no setting of ToyEnvs; did you mean env.num_envs?"),
    "mistyped loop key": (["--trainer.fit_loop.epochs=3"], "did you mean trainer.fit_loop.update_epochs?"),
    "mistyped objective key": (["--model.objective.gama=1"], "no setting of PPO; did you mean model.objective.gamma?"),
    "mistyped option": (["--ckpt_pat=last"], "there is no 'ckpt_pat' here; did you mean ckpt_path?"),
    "stray word": (["quickly"], "nothing is expected at 'quickly'"),
    "wrong type": (["--trainer.max_steps=many"], "trainer.max_steps=many must be a whole number"),
    "wrong type or null": (["--trainer.max_env_steps=many"], "trainer.max_env_steps=many must be a whole number or null"),
    "wrong type in a class": (["--model.lr=fast"], "model.lr=fast must be a number"),
    "wrong type in a nested class": (["--model.objective.gamma=x"], "model.objective.gamma=x must be a number"),
    "fraction for a count": (["--env.num_envs=1.5"], "env.num_envs=1.5 must be a whole number"),
    "null for a number": (["--env.num_envs=null"], "env.num_envs=null must be a whole number"),
    "null for a choice": (["--env.obs=null"], "env.obs=null must be state, rgb or rgb+state"),
    "null for a named choice": (
        ["--env.on_success=null"],
        "env.on_success=null must be terminate, finish_chunk or continue",
    ),
    "null for a loop's choice": (
        ["--trainer.fit_loop=StreamingFitLoop", "--trainer.fit_loop.selection=null"],
        "trainer.fit_loop.selection=null must be oldest, freshest or balanced_tasks",
    ),
    "unknown choice": (["--env.obs=rgbd"], "env.obs=rgbd must be state, rgb or rgb+state; did you mean rgb?"),
    "camera where there is none": (["--model.use_images=true"], "the envs have no camera; choose an env.obs with rgb"),
    "nothing to look at": (["--env.obs=rgb", "--model.use_images=false"], "nothing to see: the envs give no state"),
    "unknown choice or bool": (["--model.use_images=x"], "model.use_images=x must be true, false or auto"),
    "unknown precision": (["--trainer.precision=16"], "trainer.precision=16 must be 32-true or bf16-mixed"),
    "unknown env": (["--env=ToyEnv"], "env: ToyEnv is no class that is known here; did you mean ToyEnvs?\n  choices: "),
    "unknown policy": (["--model=TinyPolicy"], "did you mean TinyVLAPolicy?\n  choices: "),
    "unknown loop": (["--trainer.fit_loop=SincFitLoop"], "did you mean SyncFitLoop?\n  choices: "),
    "the choices of loops": (["--trainer.fit_loop=SincFitLoop"], "StreamingFitLoop, SyncFitLoop (or the class_path"),
    "unknown callback": (["--trainer.callbacks+=Checkpoints"], "did you mean Checkpoint?\n  choices: "),
    "the choices of callbacks": (["--trainer.callbacks+=Checkpoints"], "StalenessAlert, "),
    "ambiguous logger": (["--trainer.loggers+=CSVLogger"], "lightning.fabric.loggers.CSVLogger, lightning.pytorch.loggers"),
    "number out of range": (["--env.num_envs=0"], "env.num_envs=0 must be at least 1"),
    "number out of range, nested": (["--model.objective.clip_low=2"], "objective.clip_low=2.0 must be between 0 and 1"),
    "trainer number out of range": (["--trainer.max_steps=-7"], "trainer.max_steps=-7 must be at least -1"),
    "name that is a path": (["--trainer.name=a/b"], "trainer.name='a/b' must be a plain directory name"),
    "chunk longer than episode": (["--env.chunk_size=99"], "env.chunk_size=99 is longer than env.max_episode_steps=20"),
    "mini-batch larger than batch": (
        ["--trainer.fit_loop.mini_batch_size=999999"],
        "fit_loop.mini_batch_size=999999 is larger than the global batch of 256 decisions (env.num_envs=16 times",
    ),
    "fit without objective": (["--model.objective=null"], "model.objective is not set; fit needs one"),
    "missing checkpoint": (["--ckpt_path=gone.ckpt"], "ckpt_path='gone.ckpt' is not a file"),
    "no run to resume": (["--ckpt_path=last"], "no run under runs/toy_ppo has checkpoints/last.ckpt yet"),
    "no weights to start from": (["--trainer.init_from=best"], "no run under runs/toy_ppo has checkpoints/best.ckpt yet"),
    "env without task": (["--env=ManiSkillEnvs"], "env needs task, which has no default; set env.task"),
    "unknown task": (["--env=ManiSkillEnvs", "--env.task=PushCub-v1"], "env.task='PushCub-v1' is no task"),
    "the choices of tasks": (["--env=ManiSkillEnvs", "--env.task=x"], "PushCube-v1"),
    "unknown suite": (["--env=LiberoEnvs", "--env.suite=libero_x"], "env.suite=libero_x must be libero_spatial"),
    "task that the suite lacks": (["--env=LiberoEnvs", "--env.task_ids=[99]"], "env.task_ids=[99]"),
    "option without value": (["--trainer.max_steps"], "argument --trainer.max_steps: expected one argument"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_wrong_argument_is_refused(case):
    args, expected = ARGUMENTS[case]
    assert expected in refusal("fit", "--config", RECIPE, *args)


CONFIGS = {
    "mistyped section": ("trainr: {max_steps: 3}", "there is no 'trainr' here; did you mean trainer?"),
    "section of another program": ("data: {batch_size: 3}", "data is no setting here; use env"),
    "the seed's place": ("seed_everything: 3", "seed_everything is no setting here; use trainer.seed"),
    "mistyped key": ("trainer: {max_stepz: 3}", "did you mean trainer.max_steps?"),
    "mistyped key in init_args": ("env: {init_args: {num_env: 3}}", "did you mean env.num_envs?"),
    "mistyped key of an inline loop": (
        "trainer: {evaluate_loop: {num_episode: 4}}",
        "trainer.evaluate_loop.num_episode is no setting of EvaluateLoop; did you mean trainer.evaluate_loop.num_episodes?",
    ),
    "mistyped key of a callback": (
        "trainer: {callbacks: [{class_path: Checkpoint, init_args: {every: 3}}]}",
        "trainer.callbacks.every is no setting of Checkpoint",
    ),
    "wrong type": ("trainer: {fit_loop: {update_epochs: x}}", "trainer.fit_loop.update_epochs=x must be a whole number"),
    "value for a section": ("trainer: {evaluate_loop: 3}", "trainer.evaluate_loop=3 must hold settings of EvaluateLoop"),
    "empty section": ("env:", "env=null must hold settings"),
    "number for the trainer": ("trainer: 3", "trainer=3 must hold settings"),
    "class that is not there": (
        "env: {class_path: vla_async.envs.Toys}",
        "vla_async.envs.Toys does not exist; did you mean",
    ),
    "module that is not there": ("model: {class_path: nowhere.Policy}", "model: nowhere.Policy cannot be imported"),
    "class of another kind": ("env: {class_path: torch.nn.Linear}", "env: torch.nn.Linear is no EnvFactory\n  choices: "),
    "abstract class": ("env: {class_path: vla_async.envs.EnvFactory}", "vla_async.envs.EnvFactory is abstract\n  choices: "),
    "Lightning's own callback": (
        "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint}]}",
        "lightning.pytorch.callbacks.ModelCheckpoint is no Callback; did you mean Checkpoint?",
    ),
    "no YAML": ("trainer: [", "wrong.yaml is not valid YAML"),
    "text": ("push the cube", "wrong.yaml must hold the sections trainer, model and env, but is 'push the cube'"),
    "nothing": ("", "must hold the sections trainer, model and env, but is None"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_config_is_refused(case, tmp_path):
    content, expected = CONFIGS[case]
    (tmp_path / "wrong.yaml").write_text(content)
    assert expected in refusal("fit", "--config", RECIPE, "--config", "wrong.yaml")


def test_a_missing_config_names_the_nearest_one(tmp_path):
    message = refusal("fit", f"--config={RECIPE.replace('toy', 'tyo')}")
    assert "there is no such file; did you mean" in message
    assert RECIPE in message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], f"no subcommand; choose {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}, for example: vla-async fit"),
        (["fitt"], "there is no subcommand 'fitt'; did you mean fit?"),
        (["fot"], "there is no subcommand 'fot'; did you mean fit?"),
        (["--config", RECIPE, "fit"], "the subcommand comes first"),
        (["fit", "--config"], "--config needs a file"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_imported(args, expected):
    with pytest.raises(ConfigError) as caught:
        check_command_line(args)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("subcommand", "section"), [("fit", "env"), ("collect", "env"), ("test", "model")])
def test_a_section_that_is_needed_is_named_with_its_choices(subcommand, section):
    args = ["--env=ToyEnvs"] if section == "model" else []
    message = refusal(subcommand, *args)
    assert message.startswith(f"{section} is not set; give a --config file with a section {section}, or --{section} CLASS")
    assert {"env": "ToyEnvs", "model": "TinyVLAPolicy"}[section] in message


def test_collecting_without_a_controller_is_refused():
    assert "trainer.collect_loop.controller is not set" in refusal("collect", "--config", RECIPE)


def test_imitating_without_demonstrations_is_refused():
    message = refusal("sft", "--config", RECIPE)
    assert "sft_loop.directory='demonstrations'" in message
    assert "vla-async collect" in message


def test_only_training_and_evaluation_take_a_checkpoint():
    assert "there is no 'ckpt_path' here" in refusal("collect", "--config", RECIPE, "--ckpt_path=last")


class NeedsWidth(VLAPolicy):
    """A policy with a setting that has no default."""

    def __init__(self, width: int) -> None:
        super().__init__()


def test_a_setting_without_default_is_asked_for():
    message = refusal("fit", "--env=ToyEnvs", "--model=tests.test_cli_refusals.NeedsWidth")
    assert message == "model needs width, which has no default; set model.width"


def test_an_unknown_report_is_passed_on():
    """A report of a later jsonargparse that says something new must not be swallowed."""
    assert explain("something entirely new", parser=None) == "something entirely new"  # type: ignore[arg-type]


PROCESSES = {
    "refused before the imports": (["-m", "vla_async", "fitt"], "did you mean fit?"),
    "refused by the parser": (["-m", "vla_async", "fit", "--config", RECIPE, "--trainer.max_step=3"], "trainer.max_steps?"),
    "refused by the loop": (["-m", "vla_async", "sft", "--config", RECIPE], "sft_loop.directory='demonstrations'"),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_a_refused_process_says_one_message_and_fails(case):
    args, expected = PROCESSES[case]
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("vla-async: ")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
