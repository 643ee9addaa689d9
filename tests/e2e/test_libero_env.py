"""The real LIBERO: the official scenes, pictures and motions, and a scripted success."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import LiberoWrapper
from torchrl.envs.utils import check_env_specs

from vla_async import keys
from vla_async.envs import ChunkedEnv, LiberoEnvs
from vla_async.envs.libero import CameraName, LiberoSimulator, _numpy_seed, get_args
from vla_async.envs.libero_controllers import LiberoPickPlaceController
from vla_async.envs.libero_install import build_libero_env, choose_gl, libero_paths, load_init_states

SIZE = 32
WRIST: CameraName = "robot0_eye_in_hand"
ROW = torch.tensor([True])
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"


def random_actions(count: int) -> Tensor:
    return torch.rand(count, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1


def make_current(libero: Any) -> None:
    """Robosuite draws into, and frees from, whichever OpenGL context of the process is current."""
    libero.sim._render_context_offscreen.gl_ctx.make_current()


@pytest.fixture(scope="module")
def factory() -> LiberoEnvs:
    made = LiberoEnvs(
        task_ids=[0],
        num_envs=1,
        image_size=SIZE,
        wrist_camera=WRIST,
        init_state_mode="cycle",
        chunk_size=4,
        on_success="continue",
    )
    made.check()
    return made


@pytest.fixture(scope="module")
def env(factory: LiberoEnvs) -> Iterator[ChunkedEnv]:
    made = factory.make(0, render=True)
    yield made
    made.close()


@pytest.fixture
def simulator(env: ChunkedEnv) -> LiberoSimulator:
    assert isinstance(env.simulator, LiberoSimulator)
    return env.simulator


@pytest.fixture
def official(factory: LiberoEnvs, env: ChunkedEnv) -> Iterator[LiberoWrapper]:
    """LIBERO and TorchRL's wrapper as they are: the scene is built anew at each reset, pictures are drawn in each step."""
    paths, task = libero_paths(), factory.task_names[0]
    bddl = str(paths["bddl_files"] / factory.suite / f"{task}.bddl")
    made: Any = build_libero_env(*choose_gl("auto"), bddl_file_name=bddl, camera_heights=SIZE, camera_widths=SIZE)
    states = load_init_states(paths["init_states"] / factory.suite / f"{task}.pruned_init")
    yield LiberoWrapper(made, init_states=states, init_state_mode="fixed", init_state_id=5, wrist_camera=WRIST)
    make_current(made)
    made.close()


def assert_same(observation: Any, official: TensorDict, state: Any, official_state: Any) -> None:
    assert (state == official_state).all()
    for name in ("state", "image", "wrist_image"):
        assert torch.equal(observation[name][0], official["observation", name]), name


def test_resets_steps_and_pictures_are_the_official_ones(simulator: LiberoSimulator, official: LiberoWrapper) -> None:
    """The quick reset and the pictures drawn when looked at must not change a single bit of the benchmark."""
    simulator.reset(ROW, torch.tensor([8]))
    for action in random_actions(3):
        simulator.step(action.unsqueeze(0), ROW)  # what must leave no trace
    make_current(official._env)
    with _numpy_seed(5):
        expected = official._reset()
    observation = simulator.reset(ROW, torch.tensor([5]))
    assert_same(observation, expected, simulator.env.get_sim_state(), official._env.get_sim_state())
    actions = random_actions(6)
    steps = [simulator.step(action.unsqueeze(0), ROW).observation for action in actions]
    picture = {name: steps[-1][name] for name in steps[-1]}
    make_current(official._env)
    for action in actions:
        expected = official._step(TensorDict({"action": action}))
    assert_same(picture, expected, simulator.env.get_sim_state(), official._env.get_sim_state())


def test_a_seed_fixes_the_initial_state_whatever_ran_before(simulator: LiberoSimulator) -> None:
    first = simulator.reset(ROW, torch.tensor([3]))
    state = simulator.env.get_sim_state()
    other = simulator.reset(ROW, torch.tensor([4]))
    assert not torch.equal(first["state"], other["state"])
    closing = torch.tensor([[1.0, 1.0, -1.0, 0.5, 0.5, 0.5, 1.0]])
    for _ in range(12):
        simulator.step(closing, ROW)  # leaves the gripper's own command closed, which robosuite's reset forgets
    torch.manual_seed(1)
    again = simulator.reset(ROW, torch.tensor([53]))  # 53 modulo 50 states
    assert (simulator.env.get_sim_state() == state).all()
    for name, leaf in first.items():
        assert torch.equal(leaf, again[name]), name


def test_a_reset_leaves_numpys_generator_alone(simulator: LiberoSimulator) -> None:
    """LIBERO seeds and draws from the global generator, which belongs to the user."""
    import numpy as np

    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    simulator.reset(ROW, torch.tensor([1]))
    assert np.random.rand() == expected


def test_the_env_keeps_torchrls_rules(env: ChunkedEnv) -> None:
    check_env_specs(env)
    td = env.reset()
    assert td[keys.INSTRUCTION] == INSTRUCTION
    assert td[keys.STATE].shape == (9,)
    for name in ("image", "wrist_image"):
        assert td["observation", name].shape == (3, SIZE, SIZE)
        assert td["observation", name].dtype == torch.uint8
        assert td["observation", name].float().std() > 10  # not a blank picture
    assert env.env_spec.images == {"image": (3, SIZE, SIZE), "wrist_image": (3, SIZE, SIZE)}
    assert (env.env_spec.action_dim, env.env_spec.state_dim) == (7, 9)


def test_videos_are_large_enough_and_show_the_policys_view(simulator: LiberoSimulator) -> None:
    observation = simulator.reset(ROW, torch.tensor([0]))
    frame = simulator.render()
    assert frame.shape == (128, 128, 3)
    assert frame.dtype == torch.uint8
    shrunk = frame.reshape(SIZE, 4, SIZE, 4, 3).float().mean(dim=(1, 3))
    seen = observation["image"][0].permute(1, 2, 0).float()
    assert (shrunk - seen).abs().mean() < 12  # the same view: another camera, or one upside down, is further than 40 off


def test_every_camera_of_the_choice_exists(simulator: LiberoSimulator) -> None:
    assert set(get_args(CameraName)) <= set(simulator.env.sim.model.camera_names)


def test_the_scripted_controller_succeeds_and_the_env_goes_on(env: ChunkedEnv, simulator: LiberoSimulator) -> None:
    """Success must pay, be told, and with ``continue`` not end the episode."""
    env.reset_rows(ROW, torch.tensor([0]))
    controller = LiberoPickPlaceController()
    controller.reset(simulator)
    for _ in range(40):
        actions = []
        for _ in range(4):
            actions.append(controller.act(simulator))
            assert actions[-1].shape == (1, 7)
            result = simulator.step(actions[-1], ROW)
            assert result.reward.tolist() == [float(result.success)]
            if result.success:
                break
        if result.success:
            break
    assert result.success, "the bowl is not on the plate after 160 env steps"
    step = env.step_chunk(actions[-1].unsqueeze(1).expand(1, 4, 7))
    assert step.success_once.item()
    assert step.executed.all()
    assert step.step_rewards.sum() >= 1
    assert not step.done.any()


def test_the_controller_refuses_what_it_cannot_do(simulator: LiberoSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tasks of libero_10 ask for two things."""
    problem = dict(simulator.env.env.parsed_problem, goal_state=[["open", "wooden_cabinet_1_top_region"]])
    monkeypatch.setattr(simulator.env.env, "parsed_problem", problem)
    with pytest.raises(ValueError, match=r"env\.task_ids"):
        LiberoPickPlaceController().reset(simulator)
