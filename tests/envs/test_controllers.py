"""Scripted controllers: they solve what they are for, refuse what they are not, and their noise belongs to the episode."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.fake_maniskill import FakeManiSkill
from vla_async.envs import ManiSkillEnvs, ToyEnvs
from vla_async.envs.controllers import PickCubeController, PushCubeController, ScriptedController, ToyController
from vla_async.envs.maniskill_simulator import ManiSkillSimulator

ALL = torch.ones(1, dtype=torch.bool)


def maniskill(**settings_: Any) -> ManiSkillSimulator:
    """A simulator that is enough to be refused."""
    factory = ManiSkillEnvs(**({"task": "PushCube-v1", "num_envs": 1} | settings_))
    return ManiSkillSimulator(FakeManiSkill(factory), factory)


@pytest.mark.parametrize("obs", ["state", "rgb"])
def test_the_toy_controller_always_succeeds(obs: Any) -> None:
    """It reads the target even where the policy cannot see it."""
    env = ToyEnvs(obs=obs).make(0)
    controller = pickle.loads(pickle.dumps(ToyController()))
    for seed in range(20):
        env.reset_rows(ALL, torch.tensor([seed]))
        controller.reset(env.simulator)
        while not (result := env.step_chunk(controller.act(env.simulator).unsqueeze(1))).done.item():
            pass
        assert result.success.item()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1), companion=st.integers(0, 2**31 - 1))
def test_noise_is_a_function_of_the_episode_and_the_env_step(seed: int, companion: int) -> None:
    """Whatever the other rows do and whenever they restart, an attempt with a seed is the same attempt."""

    def actions(simulator: Any, row: int, restart: bool) -> torch.Tensor:
        taken = []
        for step in range(3):
            action = controller.act(simulator)
            taken.append(action[row])
            simulator.step(action, torch.ones(simulator.num_rows, dtype=torch.bool))
            if restart and step == 1:
                simulator.reset(torch.tensor([False, True]), torch.tensor([0, companion]))
        return torch.stack(taken)

    controller = ToyController(noise_std=0.1)
    single = ToyEnvs().make_simulator(0)
    single.reset(ALL, torch.tensor([seed]))
    pair = ToyEnvs(num_envs=2, batched=True).make_simulator(0)
    pair.reset(torch.tensor([True, True]), torch.tensor([seed, companion]))
    alone = actions(single, 0, restart=False)
    assert torch.equal(alone, actions(pair, 0, restart=True))
    assert not torch.equal(alone[0], alone[1]), "the noise is the same at every env step"


def test_actions_stay_within_the_bounds() -> None:
    """A demonstration must hold the action that was executed, which the env would clip."""
    simulator = ToyEnvs().make_simulator(0)
    action = ToyController(noise_std=50.0).act(simulator)
    assert (action.abs() <= 1).all()
    assert (action.abs() == 1).any()


def test_a_controller_refuses_negative_noise() -> None:
    with pytest.raises(ValueError, match=r"controller\.noise_std=-1 must not be negative"):
        PushCubeController(noise_std=-1)


@pytest.mark.parametrize(
    ("controller", "simulator", "message"),
    [
        (ToyController(), lambda: maniskill(), "ToyController acts in ToyEnvs, not in a ManiSkillSimulator"),
        (PushCubeController(), lambda: ToyEnvs().make_simulator(0), "acts in ManiSkillEnvs, not in a ToySimulator"),
        (PickCubeController(), lambda: maniskill(), "needs env.task=PickCube-v1, not PushCube-v1"),
        (
            PushCubeController(),
            lambda: maniskill(control_mode="pd_joint_delta_pos"),
            "needs env.control_mode=pd_ee_delta_pos, not pd_joint_delta_pos",
        ),
        (PushCubeController(), lambda: maniskill(robot="fetch"), "needs env.robot=panda, not fetch"),
    ],
)
def test_a_controller_says_which_setting_it_needs(controller: ScriptedController, simulator: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        controller.reset(simulator())


def pushing(cube: list[float], **settings_: Any) -> ManiSkillSimulator:
    """The gripper 20 cm above the origin, and the cube somewhere."""
    simulator = maniskill(**settings_)
    simulator.env.agent.tcp = SimpleNamespace(pose=SimpleNamespace(p=torch.tensor([[0.0, 0.0, 0.2]])))
    simulator.env.obj = SimpleNamespace(pose=SimpleNamespace(p=torch.tensor([cube])))
    return simulator


def test_a_long_way_is_cut_without_bending_it() -> None:
    """The gripper moves straight: an element that is cut at its bound would change the direction."""
    action = PushCubeController().plan(pushing([0.47, 0.1, 0.02]))
    assert action.tolist() == [[pytest.approx(1.0), pytest.approx(0.25), pytest.approx(-0.25), -1.0]]


def test_noise_grows_with_the_motion_and_spares_the_fingers() -> None:
    """Else a grasp would shake, and open."""
    simulator = pushing([0.09, 0.0, 0.02])
    simulator.action_low, simulator.action_high = (-9.0,) * 4, (9.0,) * 4
    plan = PushCubeController().plan(simulator)
    assert plan[0, :3].abs().max().item() == pytest.approx(1.0)
    away = []
    for seed in range(400):
        simulator.seeds = torch.tensor([seed])
        away.append(PushCubeController(noise_std=0.5).act(simulator) - plan)
    spread = torch.cat(away).std(0).tolist()
    assert spread == [pytest.approx(0.5, rel=0.15)] * 3 + [0.0]
    still = PickCubeController().spread(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    assert not still.any()
