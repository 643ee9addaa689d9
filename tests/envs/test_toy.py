"""ToyEnvs: what they show, what they refuse, and that rows of a batch are independent envs."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs.utils import check_env_specs

from vla_async.envs import ToyEnvs

ALL = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("obs", ["state", "rgb", "rgb+state"])
@pytest.mark.parametrize("batched", [False, True])
def test_torchrls_own_checks_pass(obs: Any, batched: bool) -> None:
    env = ToyEnvs(num_envs=3, obs=obs, batched=batched, chunk_size=2).make(0)
    check_env_specs(env)
    assert env.batch_size == torch.Size([3] if batched else [])


@pytest.mark.parametrize(("obs", "state_dim", "images"), [("state", 6, {}), ("rgb", None, {"image": (3, 8, 8)})])
def test_obs_decides_what_a_policy_sees(obs: Any, state_dim: int | None, images: dict[str, Any]) -> None:
    spec = ToyEnvs(obs=obs, action_dim=3, image_size=8).make(0).env_spec
    assert (spec.state_dim, spec.images, spec.action_dim) == (state_dim, images, 3)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1), other=st.integers(0, 2**31 - 1), steps=st.integers(0, 5))
def test_a_seed_fixes_the_initial_state_whatever_ran_before(seed: int, other: int, steps: int) -> None:
    fresh, used = ToyEnvs().make(0), ToyEnvs().make(0)
    used.reset_rows(ALL, torch.tensor([other]))
    for _ in range(steps):
        used.step_chunk(torch.rand(1, 1, 2))
    expected = fresh.reset_rows(ALL, torch.tensor([seed]))["state"]
    assert torch.equal(used.reset_rows(ALL, torch.tensor([seed]))["state"], expected)


def test_rows_of_a_batch_behave_like_single_envs() -> None:
    """Other companions, other restarts: row ``i`` of a batch gives, number for number, what a single env gives."""
    batch = ToyEnvs(num_envs=3, batched=True, max_episode_steps=4, chunk_size=2).make(0)
    singles = [ToyEnvs(max_episode_steps=4, chunk_size=2).make(0) for _ in range(3)]
    rows, seeds = torch.tensor([True, True, True]), torch.tensor([1, 2, 3])
    generator = torch.Generator().manual_seed(0)
    for turn in range(4):
        batch.reset_rows(rows, seeds)
        for row, env in enumerate(singles):
            if rows[row]:
                env.reset_rows(ALL, seeds[row : row + 1])
        chunk = torch.rand(3, 2, 2, generator=generator) * 2 - 1
        together = batch.step_chunk(chunk)
        for row, env in enumerate(singles):
            alone = env.step_chunk(chunk[row : row + 1])
            assert torch.equal(together.observation["state"][row], alone.observation["state"][0])
            assert torch.equal(together.step_rewards[row], alone.step_rewards[0])
            assert together.truncated[row] == alone.truncated[0]
        rows, seeds = torch.tensor([turn == 0, True, turn == 1]), seeds + 10


@pytest.mark.parametrize(("reward", "first"), [("dense", -0.5), ("sparse", 0.0)])
def test_reward_is_the_distance_or_the_success(reward: Any, first: float) -> None:
    env = ToyEnvs(reward=reward, action_dim=1, success_steps=2).make(0)
    env.reset_rows(ALL, torch.tensor([5]))
    target = env.simulator.targets  # type: ignore[attr-defined]
    away = target - torch.sign(target) * 0.5
    assert env.step_chunk(away.unsqueeze(1)).step_rewards.item() == pytest.approx(first)
    assert not env.step_chunk(target.unsqueeze(1)).success.item(), "one env step near the target is not two"
    last = env.step_chunk(target.unsqueeze(1))
    assert last.success.item()
    assert last.step_rewards.item() == pytest.approx(1.0 if reward == "sparse" else 0.0)


def test_elapsed_and_seeds_follow_each_rows_episode() -> None:
    """The noise of demonstrations is keyed by them."""
    simulator = ToyEnvs(num_envs=2, batched=True).make_simulator(0)
    simulator.reset(torch.tensor([True, True]), torch.tensor([4, 5]))
    simulator.step(torch.zeros(2, 2), torch.tensor([True, False]))
    assert simulator.elapsed.tolist() == [1, 0]
    simulator.reset(torch.tensor([False, True]), torch.tensor([8, 9]))
    assert (simulator.seeds.tolist(), simulator.elapsed.tolist()) == ([4, 9], [1, 0])


def test_a_picture_needs_a_renderer() -> None:
    assert ToyEnvs().make_simulator(0, render=True).render().shape == (64, 64, 3)
    with pytest.raises(RuntimeError, match="render=True"):
        ToyEnvs().make_simulator(0).render()


def test_the_factory_travels_to_another_process() -> None:
    factory = ToyEnvs(num_envs=7, obs="rgb")
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert (factory.task_names, factory.is_batched) == (["toy-tracking"], False)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"num_envs": 0}, "env.num_envs=0 must be at least 1"),
        ({"chunk_size": 0}, "env.chunk_size=0 must be at least 1"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0 must be at least 1"),
        ({"chunk_size": 21}, "env.chunk_size=21 is longer than env.max_episode_steps=20"),
        ({"on_success": "stop"}, "env.on_success='stop': choose terminate, finish_chunk or continue"),
        ({"obs": "stat"}, "env.obs='stat': choose state, rgb or rgb+state"),
        ({"reward": "shaped"}, "env.reward='shaped': choose dense or sparse"),
        ({"action_dim": 0}, "env.action_dim=0 must be at least 1"),
        ({"image_size": 0}, "env.image_size=0 must be at least 1"),
        ({"success_tol": 0.7}, "env.success_tol=0.7 must be in (0, 0.5]"),
        ({"success_steps": 0}, "env.success_steps=0 must be from 1 to env.max_episode_steps=20"),
        ({"success_steps": 21}, "env.success_steps=21 must be from 1 to env.max_episode_steps=20"),
    ],
)
def test_refusals_name_the_field_the_value_and_the_fix(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ToyEnvs(**settings_)
