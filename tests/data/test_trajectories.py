"""What a saved trajectory holds, and that it is read back as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.data.trajectory_fakes import A, H, T, trajectory
from tests.fakes import equal
from vla_async import keys
from vla_async.data.trajectories import FORMAT, Trajectory, plain_name

IMAGES = {"image": (3, 40, 30), "a_wrist": (1, 20, 10)}


def test_a_file_is_plain_data_and_says_all(tmp_path: Path) -> None:
    """Whoever has torch can read it, without this library and without trusting the file."""
    saved = trajectory(images=IMAGES)
    path = tmp_path / "episode.pt"
    path.write_bytes(saved.to_bytes())
    content = torch.load(path, weights_only=True)
    assert content["format"] == FORMAT
    decisions = TensorDict(content["decisions"], batch_size=[T])
    shapes = {
        keys.STATE: [4], keys.IMAGE: [3, 40, 30], keys.CHUNK: [H, A], keys.POLICY_VERSION: [1], keys.STEP_REWARDS: [H],
        keys.EXECUTED: [H], keys.REWARD: [1], keys.DONE: [1], keys.TERMINATED: [1], keys.TRUNCATED: [1], keys.SUCCESS: [1],
        keys.SUCCESS_ONCE: [1],
    }  # fmt: skip
    assert {key: list(decisions[key].shape[1:]) for key in shapes} == shapes
    assert decisions[keys.REWARD].flatten().tolist() == [1.0, 1.0, 0.5]
    assert decisions[keys.DONE].flatten().tolist() == [False, False, True]
    info = content["info"]
    assert (info["task"], info["seed"], info["policy_version"], info["step"]) == ("push", 7, 5, 6)
    assert (info["success_once"], info["return"], info["env_steps"]) == (False, 2.5, 5)
    again = Trajectory.load(path)
    assert equal(again.decisions.to_dict(), saved.decisions.to_dict())
    assert equal(again.final_observation, saved.final_observation)
    assert again.info == saved.info


def test_a_part_of_a_large_tensor_is_saved_alone() -> None:
    """A file with one episode must not hold the memory of all that were played beside it."""
    saved = trajectory()
    size = len(saved.to_bytes())
    wide = torch.zeros(T, 100_000, 4)
    saved.decisions.set(keys.STATE, wide[:, 7])
    saved.final_observation["state"] = wide[0, 5]
    assert len(saved.to_bytes()) < size + 4096


def test_pictures_stand_side_by_side_and_are_large_enough_to_be_seen() -> None:
    """Of every decision and the end, the main camera first, whatever their sizes."""
    pictures = trajectory(images=IMAGES).pictures()
    assert len(pictures) == T + 1
    assert {tuple(picture.shape) for picture in pictures} == {(160, 160, 3)}, "4 times 40 × (30 + 10)"
    assert pictures[0][:, :120].unique().tolist() == [7]
    assert pictures[-1][:80, 120:].unique().tolist() == [9]
    assert pictures[-1][80:, 120:].unique().tolist() == [0], "what a lower picture leaves free"
    assert trajectory().pictures() == []


def test_without_images_the_rest_remains() -> None:
    left = trajectory(images=IMAGES).without_images()
    assert set(left.decisions[keys.OBSERVATION].keys()) == set(left.final_observation) == {"state"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text", "cannot be read as a trajectory: "),
        (b"", "cannot be read as a trajectory: "),
        ({"state_dict": {}}, "is no saved trajectory: its format is None"),
        ({"format": "vla_async-trajectory-0"}, "its format is 'vla_async-trajectory-0', but 'vla_async-trajectory-1' is"),
        ([1], "is no saved trajectory"),
        (None, "other.pt: there is no such file"),
    ],
)
def test_anything_else_is_refused_by_what_it_is(tmp_path: Path, content: object, message: str) -> None:
    """A checkpoint or a video is easily taken for one."""
    path = tmp_path / "other.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        Trajectory.load(path)


@pytest.mark.parametrize(
    ("task", "name"),
    [("a/b c", "a-b-c"), ("../x", "-x"), (".hidden", "hidden"), ("", "task"), ("PushCube-v1", "PushCube-v1")],
)
def test_a_task_names_a_directory_below(task: str, name: str) -> None:
    """And never one elsewhere."""
    assert plain_name(task) == name
