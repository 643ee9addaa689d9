"""LIBERO without its simulator: refusals, seeds, tasks, and what is asked of the machine."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_async.envs import LiberoEnvs, libero_install
from vla_async.envs.libero import NUM_INIT_STATES, NUM_TASKS, axis_angle
from vla_async.envs.libero_install import instruction_of, libero_paths, load_init_states

SUITES = sorted(NUM_TASKS)


# ---------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"suite": "libero_kitchen"}, ["env.suite", "libero_kitchen", "libero_spatial", "libero_90"]),
        ({"task_ids": [0, 10]}, ["env.task_ids", "[0, 10]", "0 to 9"]),
        ({"task_ids": [-1]}, ["env.task_ids", "[-1]", "0 to 9"]),
        ({"task_ids": []}, ["env.task_ids", "null"]),
        ({"image_size": 4}, ["env.image_size=4", "at least 8"]),
        ({"camera": "topview"}, ["env.camera", "topview", "agentview"]),
        ({"wrist_camera": "wrist"}, ["env.wrist_camera", "robot0_eye_in_hand"]),
        ({"wrist_camera": "agentview"}, ["env.wrist_camera", "env.camera"]),
        ({"rotation": "euler"}, ["env.rotation", "euler", "axis_angle"]),
        ({"render_quality": "best"}, ["env.render_quality", "official", "fast"]),
        ({"init_state_mode": "next"}, ["env.init_state_mode", "random", "cycle", "fixed"]),
        ({"init_state_id": 50}, ["env.init_state_id=50", "at most 49"]),
        ({"group_repeats": 0}, ["env.group_repeats=0", "at least 1"]),
        ({"settle_steps": -1}, ["env.settle_steps=-1", "at least 0"]),
        ({"mujoco_gl": "glfw"}, ["env.mujoco_gl", "glfw", "osmesa"]),
        ({"render_gpu_device_id": []}, ["env.render_gpu_device_id", "null"]),
        ({"num_envs": 0}, ["env.num_envs=0"]),
        ({"max_episode_steps": 5, "chunk_size": 8}, ["env.chunk_size=8", "env.max_episode_steps=5"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError, match=r"env\.") as refusal:
        LiberoEnvs(**wrong)
    for text in named:
        assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0]),
        ([0.0, 0.0, math.sin(math.pi / 4), math.cos(math.pi / 4)], [0.0, 0.0, math.pi / 2]),
        ([0.0, -0.6 * math.sin(1.8), 0.8 * math.sin(1.8), math.cos(1.8)], [0.0, -0.6 * 3.6, 0.8 * 3.6]),
        ([0.0, 0.0, 0.0, 1.0000001], [0.0, 0.0, 0.0]),
    ],
    ids=["no turn", "a quarter turn", "more than half a turn", "rounded beyond 1"],
)
def test_a_rotation_as_axis_and_angle(quaternion: list[float], expected: list[float]) -> None:
    """Public models were trained on these numbers; angles above pi stay there, as in their data."""
    state = torch.tensor([0.1, 0.2, 0.3, *quaternion, 0.04, -0.04])
    torch.testing.assert_close(axis_angle(state), torch.tensor([0.1, 0.2, 0.3, *expected, 0.04, -0.04]))


@pytest.mark.usefixtures("fresh_import")
def test_describing_envs_imports_no_simulator() -> None:
    """A refusal, the tasks' names and a pickle for a worker must not wait for robosuite."""
    factory = LiberoEnvs(suite="libero_10", task_ids=[3, 1], num_envs=4)
    assert len(factory.task_names) == 2
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert not [name for name in sys.modules if name.partition(".")[0] in ("libero", "robosuite")]


@pytest.mark.parametrize(
    ("suite", "horizon"),
    [("libero_spatial", 220), ("libero_object", 280), ("libero_goal", 300), ("libero_10", 520), ("libero_90", 400)],
)
def test_the_horizon_is_the_protocols_unless_given(suite: Any, horizon: int) -> None:
    factory = LiberoEnvs(suite=suite)
    assert factory.max_episode_steps == horizon
    assert dataclasses.replace(factory, num_envs=1).max_episode_steps == horizon
    assert LiberoEnvs(suite=suite, max_episode_steps=30).max_episode_steps == 30


def test_devices_are_dealt_out_to_the_envs() -> None:
    assert LiberoEnvs().device_of(3) is None
    assert LiberoEnvs(render_gpu_device_id=2).device_of(3) == 2
    assert [LiberoEnvs(render_gpu_device_id=[4, 6]).device_of(index) for index in range(3)] == [4, 6, 4]


# ---------------------------------------------------------------------------------------------- seeds


@given(first=st.integers(0, 2**31))
def test_as_many_consecutive_seeds_as_states_meet_each_state_once(first: int) -> None:
    """Otherwise an evaluation would repeat some official states and leave others out."""
    factory = LiberoEnvs(init_state_mode="cycle")
    assert sorted(factory.init_state_index(first + k) for k in range(NUM_INIT_STATES)) == list(range(NUM_INIT_STATES))


@given(mode=st.sampled_from(["random", "cycle"]), group=st.integers(0, 2**20), repeats=st.integers(1, 16))
def test_a_group_shares_its_state_and_the_next_group_is_drawn_anew(mode: Any, group: int, repeats: int) -> None:
    grouped, single = LiberoEnvs(init_state_mode=mode, group_repeats=repeats), LiberoEnvs(init_state_mode=mode)
    indices = [grouped.init_state_index(group * repeats + member) for member in range(repeats)]
    assert indices == [single.init_state_index(group)] * repeats


def test_random_seeds_spread_over_all_states() -> None:
    """A constant, or a hash that favours some states, would starve the others of training."""
    counts = Counter(LiberoEnvs().init_state_index(seed) for seed in range(5000))
    assert set(counts) == set(range(NUM_INIT_STATES))
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi_square < 86  # 49 degrees of freedom: exceeded once in a thousand hashes


def test_the_fixed_mode_ignores_the_seed() -> None:
    factory = LiberoEnvs(init_state_mode="fixed", init_state_id=7)
    assert {factory.init_state_index(seed) for seed in range(20)} == {7}


# ---------------------------------------------------------------------------------------------- against the real package


@pytest.mark.parametrize("suite", SUITES)
def test_tasks_are_the_installed_benchmarks(suite: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Order and instructions decide what a published number means."""
    names = LiberoEnvs(suite=suite).task_names
    assert len(names) == NUM_TASKS[suite]
    libero_paths()
    assert capfd.readouterr() == ("", "")  # the lines that the benchmark prints below are not ours
    from libero.libero import benchmark

    official = benchmark.get_benchmark_dict()[suite]()
    assert names == official.get_task_names()
    assert [instruction_of(name) for name in names] == [official.get_task(i).language for i in range(len(names))]


def test_every_task_has_its_definition_and_its_initial_states() -> None:
    paths = libero_paths()
    for suite in SUITES:
        for task in LiberoEnvs(suite=suite).task_names:  # type: ignore[arg-type]
            assert (paths["bddl_files"] / suite / f"{task}.bddl").is_file()
            states = load_init_states(paths["init_states"] / suite / f"{task}.pruned_init")
            assert states.shape[0] == NUM_INIT_STATES
            assert np.isfinite(states).all()


def test_tasks_have_names_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's config must still load on a machine that only trains."""
    monkeypatch.setattr(libero_install, "_package_folder", lambda: None)
    assert LiberoEnvs(suite="libero_goal", task_ids=[2, 0]).task_names == ["libero_goal/2", "libero_goal/0"]
