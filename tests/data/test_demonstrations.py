"""Demonstrations on disk: what is written, how it is read, and what a broken write leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler

from tests.fakes import KnownPolicy
from vla_async import keys
from vla_async.data import Demonstrations, DemonstrationWriter
from vla_async.envs import EnvFactory, EnvSpec, ToyEnvs
from vla_async.envs.libero import LiberoEnvs
from vla_async.envs.maniskill import ManiSkillEnvs

SPEC = EnvSpec((-1.0, -1.0), (1.0, 1.0), chunk_size=1, state_dim=3, images={"image": (3, 4, 4)})


def episode(length: int, first: float) -> TensorDict:
    """Frame ``i`` has the action (first + i, -i) and a state that names it."""
    index = torch.arange(length, dtype=torch.float32)
    last = torch.arange(length) == length - 1
    observation = {
        "state": (first + index).unsqueeze(-1).expand(-1, 3).clone(),
        "image": torch.full((length, 3, 4, 4), int(first) % 251, dtype=torch.uint8),
    }
    after = {"reward": index.unsqueeze(-1), "done": last.unsqueeze(-1), "success": last.unsqueeze(-1)}
    action = torch.stack([first + index, -index], dim=-1)
    return TensorDict({"observation": observation, "action": action, "next": after}, batch_size=[length])


def write(directory: Path, lengths: list[int], overwrite: bool = False, attempts: int = 9) -> DemonstrationWriter:
    writer = DemonstrationWriter(directory, SPEC, overwrite)
    for number, length in enumerate(lengths):
        frames = episode(length, first=100.0 * (number + 1))
        writer.add(frames, task=f"task {number % 2}", instruction=f"do {number}", success=True, seed=number)
    writer.write(attempts)
    return writer


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """Frames, metadata and specs, through the disk."""
    assert len(write(tmp_path / "set", [3, 2])) == 2
    data = Demonstrations(tmp_path / "set", chunk_size=4)
    assert data.spec == EnvSpec((-1.0, -1.0), (1.0, 1.0), chunk_size=4, state_dim=3, images={"image": (3, 4, 4)})
    assert (data.num_frames, data.attempts) == (5, 9)
    assert [(e.task, e.instruction, e.length, e.success, e.seed) for e in data.episodes] == [
        ("task 0", "do 0", 3, True, 0),
        ("task 1", "do 1", 2, True, 1),
    ]
    assert data.frames["action"][:, 0].tolist() == [100, 101, 102, 200, 201]
    assert data.frames["frame_index"].tolist() == [0, 1, 2, 0, 1]
    assert data.frames["next", "done"].flatten().tolist() == [False, False, True, False, True]
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["attempts"]) == (2, 5, 9)


def test_chunks_are_padded_at_the_end_of_their_own_episode(tmp_path: Path) -> None:
    """A chunk that ran on into the next episode would teach what nobody did."""
    write(tmp_path / "set", [3, 2])
    data = Demonstrations(tmp_path / "set", chunk_size=3)
    batch = data.decisions(torch.tensor([0, 1, 2, 3, 4]), data.tokens(KnownPolicy()))
    assert batch[keys.CHUNK][..., 0].tolist() == [
        [100, 101, 102],
        [101, 102, 102],
        [102, 102, 102],
        [200, 201, 201],
        [201, 201, 201],
    ]
    assert (~batch[keys.ACTION_IS_PAD]).sum(-1).tolist() == [3, 2, 1, 2, 1]
    assert (batch[keys.ACTION_IS_PAD].int().diff(dim=-1) >= 0).all(), "padding comes last"
    assert batch[keys.STATE][:, 0].tolist() == [100, 101, 102, 200, 201]
    assert batch[keys.IMAGE].dtype == torch.uint8
    words = [KnownPolicy().tokenize(f"do {number}").item() for number in (0, 0, 0, 1, 1)]
    assert batch[keys.INSTRUCTION_TOKENS].flatten().tolist() == words


def test_max_episodes_takes_the_first(tmp_path: Path) -> None:
    """A baseline from few demonstrations is made this way; frames of the others must not be sampled."""
    write(tmp_path / "set", [3, 2, 4])
    data = Demonstrations(tmp_path / "set", chunk_size=1, max_episodes=2)
    assert (len(data.episodes), data.num_frames, len(data.frames)) == (2, 5, 5)
    assert float(data.frames["action"].max()) < 300
    assert data.tokens(KnownPolicy()).shape == (2, 1)


def test_tensordict_and_torchrl_read_it(tmp_path: Path) -> None:
    """The format is TorchRL's own, so that the data is of use without this library."""
    write(tmp_path / "set", [4, 6])
    frames = TensorDict.load_memmap(tmp_path / "set" / "data")
    assert frames.batch_size == torch.Size([10])
    sampler = SliceSampler(slice_len=3, traj_key="episode_index", strict_length=True)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10), sampler=sampler, batch_size=6)
    buffer.extend(frames)
    sample: Any = buffer.sample()
    slices = sample.reshape(2, 3)
    assert (slices["frame_index"].diff(dim=1) == 1).all()
    assert (slices["episode_index"].diff(dim=1) == 0).all()


def test_what_stands_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """Hours of collecting, or somebody's photographs."""
    write(tmp_path / "set", [3])
    with pytest.raises(FileExistsError, match=r"collect_loop.directory='.*set' exists already; set collect_loop.overwrite"):
        DemonstrationWriter(tmp_path / "set", SPEC)
    (tmp_path / "photographs").mkdir()
    with pytest.raises(FileExistsError, match="it is no dataset of demonstrations, or choose another"):
        DemonstrationWriter(tmp_path / "photographs", SPEC, overwrite=True)
    write(tmp_path / "set", [2, 2], overwrite=True)
    assert Demonstrations(tmp_path / "set", chunk_size=1).num_frames == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photographs", "set"]


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()], ids=["disk full", "interrupt"])
def test_a_broken_write_leaves_no_half_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, replacing: bool
) -> None:
    """A half dataset that looks like a whole one would be trained on."""
    if replacing:
        write(tmp_path / "set", [3])
    original = Path.write_text

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "info.json":
            raise error
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RuntimeError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write(tmp_path / "set", [2, 2], overwrite=True)
    if isinstance(error, OSError):
        assert "could not be written to" in str(caught.value)
        assert "No space left" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == (["set"] if replacing else [])
    if replacing:
        assert Demonstrations(tmp_path / "set", chunk_size=1).num_frames == 3


def test_a_broken_replacement_puts_the_old_dataset_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between moving the old one away and the new one in, the disk can fail too."""
    write(tmp_path / "set", [3])
    original = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "set.unfinished":
            raise OSError("Input/output error")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RuntimeError, match="Input/output error"):
        write(tmp_path / "set", [2, 2], overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert Demonstrations(tmp_path / "set", chunk_size=1).num_frames == 3


@pytest.mark.parametrize(
    ("collected", "used", "message"),
    [
        (ToyEnvs(), ToyEnvs(obs="rgb+state"), "collected with obs='state', but env.obs='rgb\\+state'; collect"),
        (ToyEnvs(obs="rgb"), ToyEnvs(obs="rgb", image_size=8), "collected with image_size=16, but env.image_size=8"),
        (ToyEnvs(), ToyEnvs(action_dim=3), "collected with action_dim=2, but env.action_dim=3"),
        (
            ManiSkillEnvs(task="PushCube-v1", control_mode="pd_ee_delta_pose"),
            ManiSkillEnvs(task="PushCube-v1", control_mode="pd_joint_delta_pos"),
            "collected with control_mode='pd_ee_delta_pose', but env.control_mode='pd_joint_delta_pos'",
        ),
        (LiberoEnvs(), LiberoEnvs(camera="frontview"), "collected with camera='agentview', but env.camera='frontview'"),
        (LiberoEnvs(), LiberoEnvs(suite="libero_goal"), "shows .*, but env has"),
    ],
    ids=["obs", "image size", "action", "control mode", "camera", "suite"],
)
def test_a_dataset_of_other_envs_is_refused(tmp_path: Path, collected: EnvFactory, used: EnvFactory, message: str) -> None:
    """Imitation would end well, and what it learned would fail in the envs."""
    of_envs(tmp_path / "set", collected)
    with pytest.raises(ValueError, match=rf"sft_loop.directory='.*set' .*{message}"):
        Demonstrations(tmp_path / "set", chunk_size=1).check_env(used)


@pytest.mark.parametrize(
    ("collected", "used"),
    [
        (ToyEnvs(), ToyEnvs(num_envs=9, chunk_size=4, batched=True, reward="sparse", success_tol=0.3, image_size=8)),
        (
            ManiSkillEnvs(task="PushCube-v1", obs="rgb"),
            ManiSkillEnvs(task="PushCube-v1", obs="rgb", cameras=["base_camera"]),
        ),
        (LiberoEnvs(task_ids=[0]), LiberoEnvs(settle_steps=3, render_quality="fast", init_state_mode="cycle")),
    ],
    ids=["toy", "a default written out", "more tasks"],
)
def test_a_dataset_serves_envs_that_differ_in_other_ways(tmp_path: Path, collected: EnvFactory, used: EnvFactory) -> None:
    """Collection uses few envs, and chunks of one action; training need not."""
    of_envs(tmp_path / "set", collected)
    Demonstrations(tmp_path / "set", chunk_size=1).check_env(used)


def of_envs(directory: Path, factory: EnvFactory) -> None:
    """A dataset with one episode of the first task of some envs."""
    writer = DemonstrationWriter(directory, SPEC, factory=factory)
    writer.add(episode(3, first=0.0), task=factory.task_names[0], instruction="do", success=True, seed=0)
    writer.write(1)


def test_nothing_is_not_written(tmp_path: Path) -> None:
    """An empty dataset fails later, where nobody knows why."""
    with pytest.raises(RuntimeError, match="none of 9 attempts succeeded"):
        write(tmp_path / "set", [])
    assert not (tmp_path / "set").exists()


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    """With the command that makes one, and what is wrong with this one."""
    with pytest.raises(FileNotFoundError, match=r"sft_loop.directory='.*set' holds no demonstrations; collect some with"):
        Demonstrations(tmp_path / "set", chunk_size=1)
    write(tmp_path / "set", [3])
    shutil.copytree(tmp_path / "set", tmp_path / "empty")
    (tmp_path / "empty" / "meta" / "episodes.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no episode"):
        Demonstrations(tmp_path / "empty", chunk_size=1)
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    (tmp_path / "set" / "meta" / "info.json").write_text(json.dumps(info | {"format": "another"}))
    with pytest.raises(ValueError, match="has format 'another', but 'vla_async-demonstrations-1' is expected"):
        Demonstrations(tmp_path / "set", chunk_size=1)
