"""``TrajectoryRecorder`` in real runs: what it saves is what happened, and ``vla-async replay`` plays it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import pytest
import torch

from tests.fakes import ClockEnvs, make_trainer, tiny
from tests.loops.streaming_fakes import SpyPPO, known
from vla_async import keys
from vla_async.__main__ import main
from vla_async.callbacks import TrajectoryRecorder
from vla_async.data.trajectories import Trajectory
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, StreamingFitLoop, SyncFitLoop
from vla_async.rng import TRAIN_SEEDS
from vla_async.trainer import AsyncTrainer

# episodes of up to 3 decisions, in fragments of 2; half of the seeds succeed
CLOCK = ClockEnvs(max_episode_steps=5, success_at=3, success_every=2, image=True, names=("a", "b/c"))


def files(trainer: AsyncTrainer, split: str = "") -> list[Path]:
    return sorted(trainer.run.trajectories.glob(f"*/{split}*.pt"))


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[AsyncTrainer, SpyPPO]:
    """A run that streams, with an evaluation beside it."""
    objective = SpyPPO()
    trainer = make_trainer(
        tmp_path_factory.mktemp("streamed"),
        fit_loop=StreamingFitLoop(decisions_per_env=2, update_epochs=1, max_staleness=1),
        evaluate_loop=EvaluateLoop(num_episodes=4, num_videos=0, beside_training=True),
        callbacks=[TrajectoryRecorder(failed_per_task=1, successful_per_task=1, train_every_n_steps=3)],
        max_steps=12,
        val_every_n_steps=12,
        num_threads=1,
    )
    trainer.fit(known(objective), CLOCK)
    return trainer, objective


def test_there_is_one_of_each_task_split_and_verdict(streamed: tuple[AsyncTrainer, SpyPPO]) -> None:
    """As many as were asked for, the newest, with a video beside; of the evaluation in a process of its own, too."""
    trainer, _ = streamed
    found = [(path.parent.name, *path.stem.split("_")) for path in files(trainer)]
    assert {(task, split, verdict) for task, split, _, _, verdict in found} == {
        (task, split, verdict)
        for task in ("a", "b-c")
        for split in ("train", "validate")
        for verdict in ("failure", "success")
    }
    assert len(found) == 8
    assert {version for _, split, version, _, _ in found if split == "validate"} == {"000012"}
    assert max(int(version) for _, split, version, _, _ in found if split == "train") >= 8, "the first ones were kept"
    for path in files(trainer):
        info = Trajectory.load(path).info
        assert path.with_suffix(".mp4").stat().st_size > 0
        assert info["success_once"] == (info["seed"] % 2 == 0) == path.stem.endswith("success")
        assert (info["seed"] >= TRAIN_SEEDS) == (info["split"] == "validate")
    assert not [path for path in trainer.run.trajectories.rglob("*") if path.name.startswith(".unfinished")]


def test_training_episodes_hold_what_was_trained_on(streamed: tuple[AsyncTrainer, SpyPPO]) -> None:
    """Over several fragments, from the first decision to the last: actions, log-probs, values, rewards and versions."""
    trainer, objective = streamed
    trained = torch.cat([prepared.reshape(-1) for prepared in objective.prepared])
    same = (
        keys.STATE,
        keys.CHUNK,
        keys.LOG_PROB,
        keys.VALUE,
        keys.POLICY_VERSION,
        keys.STEP_REWARDS,
        keys.EXECUTED,
        keys.DONE,
    )
    assert files(trainer, "train")
    for path in files(trainer, "train"):
        saved = Trajectory.load(path)
        mine = trained[trained["collector", "seed"].flatten() == saved.info["seed"]]
        mine = mine[mine[keys.STATE][:, 1].argsort()]
        assert len(mine) == len(saved.decisions) == (2 if saved.info["success_once"] else 3)
        for key in same:
            assert torch.equal(saved.decisions[key], mine[key]), key
        assert saved.info["policy_version"] == int(mine[keys.POLICY_VERSION][-1])
        assert saved.info["policy_version"] < saved.info["step"] + 1


@pytest.mark.parametrize("split", ["train", "validate"])
def test_a_replay_reproduces_them(streamed: tuple[AsyncTrainer, SpyPPO], split: str, capsys: Any, tmp_path: Path) -> None:
    """From the file alone, to the last bit."""
    for path in files(streamed[0], split):
        video = tmp_path / "again.mp4"
        assert main(["replay", str(path), "--video", str(video), "--tolerance", "0"]) == 0
        said = capsys.readouterr().out
        assert "reproduced, to within 0" in said
        assert "warning" not in said
        with imageio.get_reader(video) as reader:
            assert sum(1 for _ in reader) == 1 + Trajectory.load(path).info["env_steps"]


def tampered(path: Path, target: Path, change: Any) -> Path:
    """A copy in which something was changed."""
    trajectory = Trajectory.load(path)
    change(trajectory)
    target.write_bytes(trajectory.to_bytes())
    return target


CHANGES = {
    "an action": (
        lambda saved: saved.decisions[keys.CHUNK][1, 0].add_(0.25),
        r"first difference: decision 1, env step 2: rewards\[0\] is .*, recorded",
    ),
    "the seed": (
        lambda saved: saved.info.update(seed=saved.info["seed"] + 1),
        r"first difference: decision 0, env step 0: observation state\[0\] is .*, recorded",
    ),
    "a reward": (
        lambda saved: saved.decisions[keys.STEP_REWARDS][0, 1].add_(1.0),
        r"first difference: decision 0, env step 0: rewards\[1\] is .*, recorded",
    ),
    "its env": (
        lambda saved: saved.info["env"]["init_args"].update(max_episode_steps=4),
        r"first difference: decision 1, env step 2: truncated is 1, recorded 0",
    ),
    "its return": (lambda saved: saved.info.update({"return": 99.0}), r"first difference: at the end: return is"),
    "its instruction": (
        lambda saved: saved.info.update(instruction="sing"),
        r"first difference: instruction is 'watch the .*', recorded 'sing'",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_replay_finds_what_is_different(
    streamed: tuple[AsyncTrainer, SpyPPO], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where it begins: the first difference is the one to look at."""
    import re

    change, message = CHANGES[what]
    path = next(path for path in files(streamed[0], "train") if path.stem.endswith("failure"))
    assert main(["replay", str(tampered(path, tmp_path / "changed.pt", change))]) == 1
    said = capsys.readouterr().out
    assert re.search(f"NOT reproduced; the {message}", said), said
    assert (tmp_path / "changed_replay.mp4").is_file(), "what happened instead is worth seeing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.info.update(env=None, env_problem="env.call is a function"), "env.call is a function"),
        (lambda saved: saved.info["env"].update(class_path="nowhere.Envs"), "the class nowhere.Envs is not there"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    streamed: tuple[AsyncTrainer, SpyPPO], change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tampered(files(streamed[0])[0], tmp_path / "changed.pt", change)
    assert main(["replay", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["FILE", "--video", "out.gif"], "--video out.gif: its name must end in .mp4"),
        (["FILE", "--tolerance", "-1"], "--tolerance -1 must be 0 or a positive number"),
        (["FILE", "--show", "maybe"], "--show: invalid choice: 'maybe'"),
        (["nothing.pt"], "nothing.pt: there is no such file"),
        (["FILE", "--env.num_envs=3"], "unrecognized arguments: --env.num_envs=3"),
    ],
)
def test_a_wrong_command_line_is_refused(
    streamed: tuple[AsyncTrainer, SpyPPO], args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(files(streamed[0])[0]) if arg == "FILE" else arg for arg in args]
    assert main(["replay", *given]) == 1
    assert message in capsys.readouterr().err


def test_a_video_that_cannot_be_written_does_not_hide_the_result(
    streamed: tuple[AsyncTrainer, SpyPPO], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.mp4").mkdir()
    assert main(["replay", str(files(streamed[0])[0]), "--video", str(tmp_path / "taken.mp4")]) == 1
    said = capsys.readouterr()
    assert "reproduced, to within" in said.out
    assert f"cannot be written to {tmp_path / 'taken.mp4'}: Is a directory; choose another place with --video" in said.err


def test_another_version_is_told_of_and_a_display_asked_for(
    streamed: tuple[AsyncTrainer, SpyPPO], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither makes a replay fail."""
    opened: list[str] = []
    monkeypatch.setattr("vla_async.replay.webbrowser.open", opened.append)
    path = tampered(
        files(streamed[0])[0],
        tmp_path / "old.pt",
        lambda saved: saved.info["versions"].update(torch="0.4", robots="7"),
    )
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["replay", str(path), "--show", "true"]) == 0
    said = capsys.readouterr().out
    assert "recorded with torch 0.4, replayed with" in said
    assert "recorded with robots 7, replayed with none" in said
    assert "no display" in said
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["replay", str(path), "--show", "true"]) == 0
    assert opened == [(tmp_path / "old_replay.mp4").as_uri()]


def test_the_synchronous_loop_and_validation_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a policy that sees no images: rendered pictures of evaluated episodes that have them, a replay of the others."""
    trainer = make_trainer(
        tmp_path,
        fit_loop=SyncFitLoop(decisions_per_env=3, update_epochs=1),
        evaluate_loop=EvaluateLoop(num_episodes=3, num_videos=1),
        callbacks=[TrajectoryRecorder(failed_per_task=2, successful_per_task=0, images=True, train_every_n_steps=1)],
        max_steps=4,
        val_every_n_steps=4,
    )
    trainer.fit(tiny(), ToyEnvs(num_envs=2, chunk_size=2, max_episode_steps=7, success_tol=0.01))
    assert "4 saved trajectories, for vla-async replay: " in capsys.readouterr().out
    trained, validated = files(trainer, "train"), files(trainer, "validate")
    assert [len(trained), len(validated)] == [2, 2]
    assert [path.with_suffix(".mp4").exists() for path in trained] == [False, False]
    assert sum(path.with_suffix(".mp4").exists() for path in validated) == 1
    for path in (*trained, *validated):
        saved = Trajectory.load(path)
        assert len(saved.decisions) == 4
        assert keys.LOG_PROB in saved.decisions.keys()
        assert main(["replay", str(path), "--tolerance", "0"]) == 0
        assert path.with_name(f"{path.stem}_replay.mp4").is_file()


def test_a_batch_is_replayed_row_by_row(tmp_path: Path) -> None:
    """A row of one simulator, of the task that it has there; test and validate on their own save, too."""
    evaluate = EvaluateLoop(num_episodes=2, num_videos=0)
    recorder = TrajectoryRecorder(failed_per_task=1, successful_per_task=0)
    trainer = make_trainer(tmp_path, evaluate_loop=evaluate, callbacks=[recorder])
    trainer.test(known(None), ClockEnvs(num_envs=3, batched=True, names=("a", "b", "c")))
    found = files(trainer, "test")
    assert [path.parent.name for path in found] == ["a", "b", "c"]
    assert [Trajectory.load(path).info["row"] for path in found] == [0, 1, 2]
    assert [main(["replay", str(path), "--tolerance", "0"]) for path in found] == [0, 0, 0]


def test_nothing_is_saved_if_nothing_is_asked_for(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(failed_per_task=0, successful_per_task=0)
    trainer = make_trainer(tmp_path, evaluate_loop=EvaluateLoop(num_episodes=1, num_videos=0), callbacks=[recorder])
    trainer.validate(known(None), ClockEnvs())
    assert not trainer.run.trajectories.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failed_per_task": -1}, r"trajectory_recorder.failed_per_task=-1 must be 0 \(none\) or a number of episodes"),
        ({"successful_per_task": -2}, r"trajectory_recorder.successful_per_task=-2 must be 0"),
        (
            {"max_bytes": 0},
            r"trajectory_recorder.max_bytes=0 must be a number of bytes; to save nothing, set failed_per_task",
        ),
        ({"train_every_n_steps": -1}, r"trajectory_recorder.train_every_n_steps=-1 must be 0 \(never\)"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrajectoryRecorder(**settings)
