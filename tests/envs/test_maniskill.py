"""ManiSkillEnvs without ManiSkill: what it refuses, its batch logic, and random numbers that belong to a row."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from tests.envs.fake_maniskill import FakeManiSkill
from vla_async.envs import ChunkedEnv, ManiSkillEnvs
from vla_async.envs import maniskill as maniskill_module
from vla_async.envs.maniskill_rows import RowPlacementSampler, RowStreams, row_seeded
from vla_async.envs.maniskill_simulator import ManiSkillSimulator
from vla_async.envs.maniskill_tasks import NEEDS_DOWNLOAD, ROBOTS, TASKS

# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"task": "PushCub-v1"}, "did you mean PushCube-v1? choose PushCube-v1, "),
        ({"task": "Chess"}, "env.task='Chess' is no task of ManiSkill that is known here; choose PushCube-v1, "),
        ({"task": "PickSingleYCB-v1"}, "env.task='PickSingleYCB-v1' needs files that ManiSkill would download"),
        ({"task": "PlugCharger-v1"}, "env.reward='dense': PlugCharger-v1 has no dense reward; set env.reward to sparse"),
        ({"reward": "shaped"}, "env.reward='shaped': choose dense or sparse"),
        ({"obs": "rgbd"}, "env.obs='rgbd': choose state, rgb or rgb+state"),
        ({"obs": "rgb", "image_size": 0}, "env.image_size=0 must be at least 1"),
        ({"task": "SO100GraspCube-v1", "obs": "rgb"}, "SO100GraspCube-v1 has no camera; set env.obs to state"),
        ({"cameras": ["base_camera"]}, "env.cameras=['base_camera'] has no effect on env.obs='state'"),
        ({"obs": "rgb", "cameras": ["hand_camera"]}, "cameras of PushCube-v1 with the robot panda: base_camera"),
        ({"obs": "rgb", "cameras": []}, "env.cameras=[] must be different cameras"),
        ({"obs": "rgb", "cameras": ["base_camera"] * 2}, "must be different cameras"),
        (
            {"control_mode": "pd_ee_delta"},
            "env.control_mode='pd_ee_delta' is not one of the robot panda; choose pd_ee_delta_pos, ",
        ),
        ({"task": "MS-CartpoleBalance-v1", "control_mode": "pd_ee_delta_pos"}, "robot cartpole; choose pd_joint_delta_pos"),
        ({"robot": "so100"}, "env.robot='so100' cannot do PushCube-v1; choose panda, fetch"),
        ({"sim_backend": "gpu"}, "env.sim_backend='gpu': choose physx_cpu, physx_cuda or physx_cuda:INDEX"),
        ({"task": "RotateValveLevel0-v1", "sim_backend": "physx_cuda"}, "disturbs the others; use physx_cpu"),
        ({"sim_backend": "physx_cuda", "env_kwargs": {"reconfiguration_freq": 1}}, "env.env_kwargs.reconfiguration_freq"),
        ({"env_kwargs": {"obs_mode": "rgbd"}}, "env.env_kwargs may not hold obs_mode"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0 must be at least 1"),
        ({"chunk_size": 51}, "env.chunk_size=51 is longer than env.max_episode_steps=50"),
        ({"num_envs": 0}, "env.num_envs=0 must be at least 1"),
    ],
)
def test_refusals_name_the_field_the_value_and_the_fix(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ManiSkillEnvs(**({"task": "PushCube-v1"} | settings_))


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_defaults_that_are_accepted(task: str) -> None:
    """Horizon, robot and control mode come from the tables, in state and, where there is one, with a camera."""
    reward: Any = "dense" if TASKS[task].dense else "sparse"
    factory = ManiSkillEnvs(task=task, reward=reward)
    assert factory.max_episode_steps == TASKS[task].horizon
    assert factory.robot in ROBOTS
    assert factory.control_mode in ROBOTS[factory.robot].control_modes
    assert (factory.task_names, factory.is_batched, factory.image_names) == ([task], False, {})
    if TASKS[task].cameras:
        assert ManiSkillEnvs(task=task, reward=reward, obs="rgb").image_names == {"image": "base_camera"}
    instruction = TASKS[task].instruction
    assert instruction == instruction.strip()
    assert task not in NEEDS_DOWNLOAD


def test_settings_survive_copies_and_other_processes() -> None:
    """A run copies the factory with another chunk size for evaluation, and sends it to its workers."""
    factory = ManiSkillEnvs(task="StackCube-v1", obs="rgb", cameras=["hand_camera", "base_camera"], max_episode_steps=30)
    assert pickle.loads(pickle.dumps(factory)) == factory
    copy = dataclasses.replace(factory, chunk_size=5)
    assert (copy.max_episode_steps, copy.image_names) == (30, {"image": "hand_camera", "base_camera": "base_camera"})


def test_a_wrong_setting_is_refused_without_importing_a_simulator() -> None:
    """It must not take the seconds that ManiSkill's import takes, nor create a Vulkan instance in the parent."""
    code = """
import sys
from vla_async.envs import ManiSkillEnvs
ManiSkillEnvs(task="PushCube-v1", obs="rgb")
try:
    ManiSkillEnvs(task="PushCub-v1")
except ValueError:
    print([name for name in ("mani_skill", "sapien", "gymnasium") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------ check


def test_check_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mani_skill" else found(name))
    with pytest.raises(RuntimeError, match=re.escape("pip install 'vla_async[maniskill]'")):
        ManiSkillEnvs(task="PushCube-v1").check()


def test_check_finds_out_that_there_is_no_vulkan_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is pointed at no driver; the message says what to install on Debian and on Ubuntu."""
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, "/nonexistent")
    with pytest.raises(RuntimeError, match=r"(?s)Ubuntu.*Debian 12.*bookworm-backports.*failed to find a rendering device"):
        ManiSkillEnvs(task="PushCube-v1").check()


@pytest.mark.parametrize(("backend", "index"), [("physx_cuda", 0), ("physx_cuda:1", 1)])
def test_check_finds_out_that_there_is_no_such_cuda_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: index)
    with pytest.raises(RuntimeError, match=f"needs CUDA device {index}, of {index} found; or use physx_cpu"):
        ManiSkillEnvs(task="PushCube-v1", sim_backend=backend).check()


# ------------------------------------------------------------------------------------------ the batched form, on a stand-in


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ChunkedEnv, FakeManiSkill]]:
    """Builds the batched env on top of a stand-in for ManiSkill's."""

    def build(task: str = "PushCube-v1", **settings_: Any) -> tuple[ChunkedEnv, FakeManiSkill]:
        monkeypatch.setattr(maniskill_module, "build_env", FakeManiSkill)
        factory = ManiSkillEnvs(**({"task": task, "sim_backend": "physx_cuda", "num_envs": 4, "image_size": 6} | settings_))
        env = factory.make(0)
        assert isinstance(env.simulator, ManiSkillSimulator)
        return env, env.simulator.env

    return build


Batch = Callable[..., tuple[ChunkedEnv, FakeManiSkill]]
EVERY = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize("obs", ["state", "rgb", "rgb+state"])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_torchrls_own_checks_pass_on_a_batch(batch: Batch, obs: str, chunk_size: int) -> None:
    env, _ = batch(obs=obs, chunk_size=chunk_size)
    assert env.batch_size == torch.Size([4])
    check_env_specs(env)


def test_rows_of_a_batch_end_at_different_times(batch: Batch) -> None:
    """Row i succeeds at step 2 + i; buffers that ManiSkill reuses must not leak into what was given away."""
    env, _ = batch(chunk_size=3)
    env.reset_rows(EVERY, torch.tensor([10, 20, 30, 40]))
    result = env.step_chunk(torch.full((4, 3, 2), 0.5))
    assert result.terminated.tolist() == [True, True, False, False]
    assert result.step_rewards.tolist() == [[1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert result.step_rewards.dtype == torch.float32
    final = result.observation["state"].clone()
    assert final.tolist() == [[11.0, 11.0, 2.0], [21.5, 21.5, 3.0], [31.5, 31.5, 3.0], [41.5, 41.5, 3.0]]
    env.reset_rows(result.done, torch.tensor([50, 60, 70, 80]))
    env.step_chunk(torch.zeros(4, 3, 2))
    assert torch.equal(result.observation["state"], final)
    assert result.success.tolist() == [True, True, False, False]


def test_a_partial_reset_is_told_the_rows_and_every_rows_own_seed(batch: Batch) -> None:
    """The rows that go on keep their seeds, positions, clocks and the targets of their controllers."""
    env, fake = batch()
    env.reset_rows(EVERY, torch.tensor([10, 20, 30, 40]))
    env.step_chunk(torch.full((4, 1, 2), 0.25))
    observation = env.reset_rows(torch.tensor([False, True, False, True]), torch.tensor([1, 2, 3, 4]))
    assert fake.resets[-1] == ([10, 2, 30, 4], [1, 3])
    assert observation["state"][:, 0].tolist() == [10.25, 2.0, 30.25, 4.0]
    assert observation["state"][:, 2].tolist() == [1, 0, 1, 0]
    assert fake.agent.target[:, 0].tolist() == [10.5, 2.0, 30.5, 4.0]
    simulator = env.simulator
    assert isinstance(simulator, ManiSkillSimulator)
    assert (simulator.seeds.tolist(), simulator.elapsed.tolist()) == ([10, 2, 30, 4], [1, 0, 1, 0])


def test_failure_is_passed_on(batch: Batch) -> None:
    env, _ = batch(chunk_size=9, on_success="continue")
    env.reset_rows(EVERY, torch.tensor([1, 2, 3, 4]))
    result = env.step_chunk(torch.zeros(4, 9, 2))
    assert result.terminated.all()
    assert result.success_once.all()
    assert not result.success.any()


def test_pictures_are_drawn_once_per_chunk(batch: Batch) -> None:
    env, fake = batch(obs="rgb", chunk_size=2, task="StackCube-v1", cameras=["hand_camera", "base_camera"])
    env.reset_rows(EVERY, torch.tensor([1, 2, 3, 4]))
    before = fake.reads
    result = env.step_chunk(torch.zeros(4, 2, 2))
    assert fake.reads == before + 1
    assert result.observation["image"].shape == (4, 3, 6, 6)
    assert (result.observation["image"][0, 0, 0, 0], result.observation["base_camera"][0, 0, 0, 0]) == (2, 3)


def test_an_observation_that_is_read_too_late_is_an_error(batch: Batch) -> None:
    """It would silently be the observation of another env step."""
    env, _ = batch()
    simulator = env.simulator
    late = simulator.step(torch.zeros(4, 2), EVERY).observation
    assert list(late) == ["state"]
    assert "image" not in late
    simulator.step(torch.zeros(4, 2), EVERY)
    with pytest.raises(RuntimeError, match="before the simulator's next step"):
        late["state"]


def test_obs_rgb_hides_what_no_camera_and_no_joint_could_tell(batch: Batch) -> None:
    """PlaceSphere gives the pose of the bin even without state; PushCube has no such entry to hide."""
    hidden, _ = batch(obs="rgb", task="PlaceSphere-v1")
    shown, _ = batch(obs="rgb")
    assert (hidden.env_spec.state_dim, shown.env_spec.state_dim) == (4, 6)


def test_the_action_of_two_robots_lies_side_by_side(batch: Batch) -> None:
    env, fake = batch(task="TwoRobotPickCube-v1")
    assert env.env_spec.action_dim == 4
    env.reset_rows(EVERY, torch.zeros(4, dtype=torch.int64))
    env.step_chunk(torch.tensor([0.1, 0.2, 0.4, 0.8]).expand(4, 1, 4))
    assert fake.position[0].tolist() == pytest.approx([0.5, 1.0])


def test_a_picture_needs_a_renderer_and_closing_closes(batch: Batch) -> None:
    env, fake = batch()
    with pytest.raises(RuntimeError, match="render=True"):
        env.simulator.render()
    fake.render_mode = "rgb_array"
    assert env.simulator.render().shape == (4, 5, 3)
    env.close()
    assert fake.closed


def test_tasks_and_instructions_are_given_per_row(batch: Batch) -> None:
    env, _ = batch()
    assert env.simulator.tasks == ["PushCube-v1"] * 4
    assert env.simulator.instructions == ["push the cube onto the round target"] * 4


# ------------------------------------------------------------------------------------------ random numbers per row

seed_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6, unique=True)


def draws(rows: int) -> list[Tensor]:
    """In all ways in which ManiSkill's tasks draw."""
    with torch.device("cpu"):
        return [
            torch.rand((rows, 2)),
            torch.rand(rows, 3),
            torch.rand(rows),
            torch.rand(size=(rows, 2)),
            torch.randn((rows, 4)),
            torch.randint(0, 5, (rows,)),
            torch.randint(7, size=(rows, 2)),
        ]


@settings(max_examples=40)
@given(seeds=seed_lists, data=st.data())
def test_what_a_row_draws_depends_on_its_own_seed_alone(seeds: list[int], data: st.DataObject) -> None:
    """Alone, or with any companions in any order, a seed gets the same numbers."""
    row = data.draw(st.integers(0, len(seeds) - 1))
    with RowStreams(torch.tensor(seeds)):
        together = draws(len(seeds))
    with RowStreams(torch.tensor(seeds[row : row + 1])):
        alone = draws(1)
    for all_rows, one in zip(together, alone, strict=True):
        assert torch.equal(all_rows[row], one[0])
        assert all_rows.dtype == one.dtype


def test_row_streams_are_spread_like_those_they_replace() -> None:
    with RowStreams(torch.arange(20_000)):
        uniform, again, gauss, dice = (
            torch.rand((20_000, 1)),
            torch.rand((20_000, 1)),
            torch.randn(20_000),
            torch.randint(1, 7, (20_000,)),
        )
    assert 0 < uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.corrcoef(torch.cat([uniform, again], dim=-1).T)[0, 1].abs() < 0.03, "two draws of a row are related"
    assert (gauss.mean().item(), gauss.std().item()) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.03))
    assert torch.bincount(dice).tolist()[0] == 0
    assert all(abs(count / 20_000 - 1 / 6) < 0.02 for count in torch.bincount(dice).tolist()[1:])


def test_a_draw_that_cannot_be_split_is_an_error() -> None:
    """Shared numbers would make a row's initial state depend on its companions."""
    with RowStreams(torch.tensor([1, 2])), pytest.raises(RuntimeError, match=r"shape \(3,\) cannot be split into 2 rows"):
        torch.rand(3)


@settings(max_examples=30)
@given(seeds=seed_lists, data=st.data())
def test_placements_depend_on_the_rows_own_seed_and_keep_their_distance(seeds: list[int], data: st.DataObject) -> None:
    """ManiSkill's own sampler moves a row again for as long as any companion has found no place."""

    def place(some: list[int]) -> list[Tensor]:
        with RowStreams(torch.tensor(some)):
            sampler = RowPlacementSampler(([-0.1, -0.2], [0.1, 0.2]), len(some))
            return [sampler.sample(0.03, 100) for _ in range(3)]

    row = data.draw(st.integers(0, len(seeds) - 1))
    together, alone = place(seeds), place(seeds[row : row + 1])
    assert all(torch.equal(many[row], one[0]) for many, one in zip(together, alone, strict=True))
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert (torch.linalg.norm(together[first] - together[second], dim=-1) > 0.06).all()


def test_a_placement_that_never_fits_is_still_within_bounds() -> None:
    with RowStreams(torch.tensor([1, 2])):
        sampler = RowPlacementSampler(([0.0], [1.0]), 2)
        sampler.sample(5.0, 10)
        crowded = sampler.sample(5.0, 10, append=False)
    assert ((crowded >= 0) & (crowded <= 1)).all()


class _Episodes:
    """The part of ManiSkill's env that initialises an episode, in all three ways in which tasks draw."""

    def __init__(self, seeds: list[int]) -> None:
        from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

        self._episode_seed = np.array(seeds)
        self._batched_episode_rng = BatchedRNG.from_seeds(seeds)
        self._episode_rng = self._batched_episode_rng[0]
        self.found: list[Tensor] = []

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        from mani_skill.envs.utils import randomization

        rows = len(env_idx)
        sampler = randomization.UniformPlacementSampler([[-0.1, -0.1], [0.1, 0.1]], rows)
        noise = self._episode_rng.normal(0, 0.02, (rows, 9))
        self.found = [torch.from_numpy(noise), sampler.sample(0.05, 100), sampler.sample(0.05, 100)]
        self.found.append(randomization.random_quaternions(rows, lock_x=True, lock_y=True))


def test_the_initial_state_of_a_row_does_not_depend_on_which_rows_restart_with_it() -> None:
    """ManiSkill's own draws, made under a row-seeded class: rows 1 and 3 restart together, or with all."""
    from mani_skill.envs.utils import randomization

    original = randomization.UniformPlacementSampler
    seeded = row_seeded(_Episodes)
    some, all_rows = seeded([5, 6, 7, 8]), seeded([1, 6, 2, 8])
    some._initialize_episode(torch.tensor([1, 3]), {})
    all_rows._initialize_episode(torch.arange(4), {})
    for few, many in zip(some.found, all_rows.found, strict=True):
        assert torch.equal(few, many[[1, 3]])
    assert randomization.UniformPlacementSampler is original, "ManiSkill was left changed"
    assert some._episode_rng is some._batched_episode_rng[0], "ManiSkill was left changed"
