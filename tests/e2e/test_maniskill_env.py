"""ManiSkillEnvs on real ManiSkill: every task, pictures, seeds, ends of episodes and the scripted controllers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from vla_async.envs import ChunkedEnv, ManiSkillEnvs
from vla_async.envs.controllers import NoisyController, PickCubeController, PushCubeController
from vla_async.envs.maniskill_rows import row_seeded
from vla_async.envs.maniskill_simulator import ManiSkillSimulator, deferring, quiet
from vla_async.envs.maniskill_tasks import NEEDS_DOWNLOAD, ROBOTS, TASKS

ALL = torch.ones(1, dtype=torch.bool)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mani_skill")


def make(task: str = "PushCube-v1", render: bool = False, **settings: Any) -> ChunkedEnv:
    if not TASKS[task].dense:
        settings["reward"] = "sparse"
    return ManiSkillEnvs(task=task, **settings).make(0, render)


@pytest.fixture(scope="module", autouse=True)
def renderer() -> Iterator[None]:
    """An env with a camera keeps the compiled shaders from one test to the next; compiling them takes seconds."""
    env = make(obs="rgb", image_size=32)
    yield
    env.close()


def inside(env: ChunkedEnv) -> ManiSkillSimulator:
    assert isinstance(env.simulator, ManiSkillSimulator)
    return env.simulator


def reset(env: ChunkedEnv, seed: int) -> dict[str, Tensor]:
    return env.reset_rows(ALL, torch.tensor([seed]))


def random_chunk(env: ChunkedEnv, generator: torch.Generator) -> Tensor:
    low, high = (torch.tensor(bound) for bound in (env.simulator.action_low, env.simulator.action_high))
    return low + (high - low) * torch.rand(1, env.chunk_size, len(low), generator=generator)


def solve(env: ChunkedEnv, controller: NoisyController, seed: int) -> Any:
    """Run an episode by the controller; returns its last env step."""
    reset(env, seed)
    controller.reset(env.simulator)
    while not (result := env.step_chunk(controller.act(env.simulator).unsqueeze(1))).done.item():
        pass
    return result


# ------------------------------------------------------------------------------------------ every task


@pytest.mark.parametrize("task", TASKS)
def test_every_task_runs_and_its_seed_fixes_its_initial_state(task: str) -> None:
    """Built offline, stepped at random, reset to the same seed: what is seen must not tell the episode before."""
    env = make(task, chunk_size=2)
    first = reset(env, 7)["state"].clone()
    assert first.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        result = env.step_chunk(random_chunk(env, generator))
        assert torch.isfinite(result.observation["state"]).all()
        assert torch.isfinite(result.step_rewards).all()
    assert not torch.equal(result.observation["state"], first), "the actions change nothing"
    assert not torch.equal(reset(env, 8)["state"], first), "another seed gives the same episode"
    assert torch.equal(reset(env, 7)["state"], first)
    env.close()


def test_the_tables_say_what_maniskill_says() -> None:
    """Horizons, rewards, supported robots, and which tasks there are: the tables stand in for an import of seconds."""
    with quiet():
        import mani_skill.envs  # noqa: F401 - registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS

    for name, task in TASKS.items():
        registered = REGISTERED_ENVS[name]
        assert registered.max_episode_steps == task.horizon, name
        assert registered.asset_download_ids == [], name
        modes = registered.cls.SUPPORTED_REWARD_MODES
        assert ("normalized_dense" in modes, "sparse" in modes) == (task.dense, True), name
        supported = registered.cls.SUPPORTED_ROBOTS
        if supported is not None and task.robots != ("two_panda_wristcam",):
            assert set(task.robots) <= set(supported), name
    assert set(NEEDS_DOWNLOAD) <= set(REGISTERED_ENVS)


@pytest.mark.parametrize(
    ("task", "robot"),
    [
        ("PushCube-v1", "panda"),
        ("PushCube-v1", "fetch"),
        ("StackCube-v1", "panda_wristcam"),
        ("PushT-v1", "panda_stick"),
        ("TwoRobotPickCube-v1", "two_panda_wristcam"),
        ("PickCube-v1", "so100"),
    ],
)
def test_the_tables_cameras_are_those_of_the_scene(task: str, robot: str) -> None:
    env = make(task, robot=robot, render=True)
    assert set(inside(env).env._sensor_configs) == {*TASKS[task].cameras, *ROBOTS[robot].cameras}
    env.close()


@pytest.mark.parametrize("mode", ROBOTS["panda"].control_modes)
def test_every_control_mode_of_the_arm_moves_it(mode: str) -> None:
    env = make(control_mode=mode)
    before = reset(env, 0)["state"].clone()
    result = env.step_chunk(random_chunk(env, torch.Generator().manual_seed(1)))
    assert not torch.equal(result.observation["state"][:, :7], before[:, :7])
    assert env.env_spec.action_dim == inside(env).env.single_action_space.shape[0]
    env.close()


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.batched])
def test_the_gpu_forms_random_numbers_fit_every_task_that_allows_it(task: str) -> None:
    """No GPU is needed to see that each draw of the task can be split by row, and that the seed decides it."""
    with quiet():
        from mani_skill.utils.registration import REGISTERED_ENVS

        kind = deferring(row_seeded(REGISTERED_ENVS[task].cls))
        backend = "cpu" if TASKS[task].drawn else "none"
        env = kind(obs_mode="state", sim_backend="physx_cpu", render_backend=backend, enhanced_determinism=True)
    states = []
    for seed in (3, 4, 3):
        env.reset(seed=[seed])
        states.append(env.get_state())
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])
    env.close()


# ------------------------------------------------------------------------------------------ seeds


def test_a_seed_gives_maniskills_own_initial_state() -> None:
    """Results can be compared with those of others, and demonstrations replayed, by seed."""
    with quiet():
        import gymnasium
        import mani_skill.envs  # noqa: F401 - registers the tasks

        theirs = gymnasium.make("PushCube-v1", obs_mode="state", sim_backend="physx_cpu", render_backend="none")
    env = make()
    for seed in (0, 5, 2**30 + 1):
        assert torch.equal(reset(env, seed)["state"], theirs.reset(seed=seed)[0])
    theirs.close()
    env.close()


def test_a_grasp_does_not_show_in_the_next_episode() -> None:
    """ManiSkill reports ``is_grasped`` from the contacts of the last physics step, which belong to the episode before."""
    env = make("PickCube-v1")
    first = reset(env, 3)["state"].clone()
    assert solve(env, PickCubeController(), 4).success.item()
    assert inside(env).env.agent.is_grasping(inside(env).env.cube).item()
    assert torch.equal(reset(env, 3)["state"], first)
    env.close()


def test_another_process_sees_the_same_initial_states(tmp_path: Any) -> None:
    """Also where a seed decides the geometry, as in PegInsertionSide."""
    code = """
import pickle, sys, torch
from vla_async.envs import ManiSkillEnvs
found = {}
for task in ("PushCube-v1", "PegInsertionSide-v1"):
    simulator = ManiSkillEnvs(task=task).make_simulator(0)
    for seed in (11, 12):
        found[task, seed] = simulator.reset(torch.ones(1, dtype=torch.bool), torch.tensor([seed]))["state"].clone()
pickle.dump(found, open(sys.argv[1], "wb"))
"""
    there = tmp_path / "found"
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, capture_output=True)
    found = pickle.loads(there.read_bytes())
    for task in ("PushCube-v1", "PegInsertionSide-v1"):
        env = make(task)
        for seed in (12, 11):
            assert torch.equal(reset(env, seed)["state"], found[task, seed])
        env.close()
    sizes = [found["PegInsertionSide-v1", seed][0, 32:35] for seed in (11, 12)]
    assert not torch.equal(*sizes), "the pegs of two seeds are equally long and thick"


# ------------------------------------------------------------------------------------------ what is seen


@pytest.mark.parametrize(("obs", "state_dim"), [("state", 35), ("rgb", 25), ("rgb+state", 35)])
def test_torchrls_own_checks_pass(obs: str, state_dim: int) -> None:
    """With pictures, the 10 numbers that tell the goal and the cube are left to the camera."""
    env = make(obs=obs, image_size=32, chunk_size=2)
    check_env_specs(env)
    assert env.env_spec.state_dim == state_dim
    assert env.env_spec.images == ({} if obs == "state" else {"image": (3, 32, 32)})
    env.close()


def test_pictures_show_the_state_that_they_are_given_with() -> None:
    """Drawn when read, they are of the moment: equal seeds give equal pictures, moved robots others."""
    env = make("StackCube-v1", obs="rgb", image_size=24, cameras=["hand_camera", "base_camera"], chunk_size=3)
    first = {name: leaf.clone() for name, leaf in reset(env, 1).items()}
    assert list(first) == ["state", "image", "base_camera"]
    assert first["image"].dtype == torch.uint8
    assert all(first[name].float().std() > 5 for name in ("image", "base_camera")), "a picture is blank"
    moved = env.step_chunk(torch.ones(1, 3, 4)).observation
    assert all((moved[name] != first[name]).any() for name in first)
    assert all(torch.equal(leaf, first[name]) for name, leaf in reset(env, 1).items())
    env.close()


def test_only_the_chosen_camera_is_drawn() -> None:
    """A wrist camera that nobody looks through would double the cost of each picture."""
    env = make("StackCube-v1", obs="rgb", image_size=24)
    reset(env, 0)
    assert list(inside(env).env.scene.sensors) == ["base_camera"]
    env.close()


def test_a_video_frame_can_be_rendered_if_asked_for() -> None:
    env = make(render=True)
    reset(env, 0)
    frame = env.simulator.render()
    assert (frame.shape, frame.dtype) == ((256, 256, 3), torch.uint8)
    env.recording = True
    later = env.step_chunk(torch.ones(1, 1, 4)).frames[0]
    assert (later != frame).any()
    env.close()
    blind = make()
    with pytest.raises(RuntimeError, match="render=True"):
        blind.simulator.render()
    blind.close()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Not even by a task whose scene ManiSkill warns about, built, reset and stepped."""
    env = make("PlaceSphere-v1")
    env.rollout(3)
    env.close()
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------ ends of episodes


@pytest.mark.parametrize("on_success", ["terminate", "finish_chunk", "continue"])
def test_a_real_success_inside_a_chunk(on_success: Any) -> None:
    """The actions of a solved episode, replayed in chunks of four: it succeeds at the same env step."""
    single, controller, actions = make(), PushCubeController(), []
    reset(single, 5)
    while True:
        actions.append(controller.act(single.simulator))
        solved = single.step_chunk(actions[-1].unsqueeze(1))
        if solved.done.item():
            break
    single.close()
    steps = len(actions)
    env = make(chunk_size=4, on_success=on_success, max_episode_steps=40)
    reset(env, 5)
    padded = torch.stack(actions + [actions[-1]] * (-steps % 4), dim=1)
    for start in range(0, steps, 4):
        result = env.step_chunk(padded[:, start : start + 4])
    assert result.success_once.item()
    assert result.terminated.item() == (on_success != "continue")
    assert result.executed.sum().item() == ((steps - 1) % 4 + 1 if on_success == "terminate" else 4)
    assert result.step_rewards[0, (steps - 1) % 4].item() == pytest.approx(1.0), "normalized_dense gives 1 at a success"
    if on_success == "terminate":
        assert torch.equal(result.observation["state"], solved.observation["state"])
    env.close()


def test_the_final_observation_reward_and_success_survive_the_reset() -> None:
    env = make(reward="sparse")
    result = solve(env, PushCubeController(), 6)
    state, rewards = result.observation["state"].clone(), result.step_rewards.clone()
    reset(env, 7)
    env.step_chunk(torch.zeros(1, 1, 4))
    assert torch.equal(result.observation["state"], state)
    assert torch.equal(result.step_rewards, rewards)
    assert rewards.item() == 1.0
    assert result.success.item()
    env.close()


def test_maniskills_own_time_limit_does_not_interfere() -> None:
    """The horizon may be longer than the one that the task is registered with."""
    env = make(max_episode_steps=60, chunk_size=60, on_success="continue")
    reset(env, 0)
    result = env.step_chunk(torch.zeros(1, 60, 4))
    assert result.executed.all()
    assert result.truncated.item()
    env.close()


def test_a_task_can_be_lost() -> None:
    """The pole falls: a failure, not a cut at the horizon."""
    env = make("MS-CartpoleBalance-v1", chunk_size=10)
    reset(env, 0)
    for _ in range(100):
        if (result := env.step_chunk(torch.ones(1, 10, 1))).done.item():
            break
    assert (result.terminated.item(), result.truncated.item(), result.success.item()) == (True, False, False)
    env.close()


def test_torchrls_rollout_runs_over_several_episodes() -> None:
    env = make(chunk_size=4, max_episode_steps=8)
    env.set_seed(1)
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["next", "done"].flatten().tolist() == [False, True] * 3
    assert rollout[0]["language_instruction"] == "push the cube onto the round target"
    starts = rollout["observation", "state"][::2]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(rollout["next", "observation", "state"][1], starts[1]), "the final observation was overwritten"
    env.set_seed(1)
    assert torch.equal(env.rollout(6, break_when_any_done=False)["observation", "state"][::2], starts)
    env.close()


# ------------------------------------------------------------------------------------------ scripted controllers


@pytest.mark.parametrize(
    ("task", "controller"),
    [
        ("PushCube-v1", PushCubeController()),
        ("PushCube-v1", PushCubeController(noise_std=0.2)),
        ("PickCube-v1", PickCubeController()),
        ("PickCube-v1", PickCubeController(noise_std=0.2)),
    ],
)
def test_scripted_controllers_solve_their_task(task: str, controller: NoisyController) -> None:
    env = make(task)
    assert sum(solve(env, controller, seed).success.item() for seed in range(10)) == 10
    env.close()
