"""Emulated envs: what they show, that their timing is their own, and that TorchRL takes them."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from vla_async import keys
from vla_async.emulation import Constant, Duration, EmulatedEnvBase, EmulatedEnvs, LogNormal, Uniform

ROW = torch.ones(1, dtype=torch.bool)


def slept(monkeypatch: pytest.MonkeyPatch, factory: EmulatedEnvs, index: int, seed: int, steps: int = 5) -> list[float]:
    """The times for which the steps of one episode sleep, on a clock that stands still."""
    times: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", times.append)
    simulator = factory.make_simulator(index)
    simulator.reset(ROW, torch.tensor([seed]))
    for _ in range(steps):
        simulator.step(torch.zeros(1, factory.action_dim), ROW)
    monkeypatch.undo()
    return times


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("cameras", [0, 2])
def test_torchrls_own_checks_pass(batched: bool, cameras: int) -> None:
    factory = EmulatedEnvs(num_envs=3, cameras=cameras, image_size=8, chunk_size=2, batched=batched)
    env = factory.make(0)
    check_env_specs(env)
    assert env.env_spec.images.keys() == ({"image", "camera_1"} if cameras else set())
    assert factory.observation_names == {"state", *env.env_spec.images}


@pytest.mark.parametrize("cameras", [0, 1])
def test_torchrls_own_checks_pass_on_the_plain_env(cameras: int) -> None:
    check_env_specs(EmulatedEnvBase(EmulatedEnvs(cameras=cameras, image_size=8).make_simulator(0)))


def test_state_and_images_count_the_env_steps_of_the_episode() -> None:
    """Who asks and where its episode stands can be read off an observation; a reset starts the count again."""
    env = EmulatedEnvs(cameras=1, image_size=4, max_episode_steps=3).make(2)
    seeds = torch.tensor([5])
    for _ in range(2):
        assert env.reset_rows(ROW, seeds)["state"][0, :2].tolist() == [0.0, 2.0]
        for step in range(1, 4):
            result = env.step_chunk(torch.zeros(1, 1, 7))
            assert result.observation["state"][0, :2].tolist() == [float(step), 2.0]
            assert int(result.observation["image"][0, 0, 0, 0]) == step
            assert (result.step_rewards.item(), result.truncated.item()) == (1.0, step == 3)


def test_rows_of_a_batch_count_for_themselves() -> None:
    simulator = EmulatedEnvs(num_envs=3, batched=True).make_simulator(0)
    simulator.reset(torch.ones(3, dtype=torch.bool), torch.arange(3))
    state = simulator.step(torch.zeros(3, 7), torch.tensor([True, False, True])).observation["state"]
    assert state[:, :2].tolist() == [[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]]


def test_the_plain_env_ends_its_episode_at_the_horizon() -> None:
    env = EmulatedEnvBase(EmulatedEnvs().make_simulator(1), max_episode_steps=3)
    rollout = env.rollout(10)
    assert rollout["next", "truncated"].flatten().tolist() == [False, False, True]
    assert rollout["observation"][:, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("step_time", [Uniform(0.5, 1.5), LogNormal(1.0), Constant(1.0)])
def test_step_times_are_a_function_of_env_and_episode(monkeypatch: pytest.MonkeyPatch, step_time: Duration) -> None:
    """Were they not, a run could not be repeated; were all envs alike, lockstep would cost nothing."""
    factory = EmulatedEnvs(step_time=step_time)
    times = slept(monkeypatch, factory, index=0, seed=3)
    assert len(times) == 5
    assert slept(monkeypatch, factory, index=0, seed=3) == times
    if not isinstance(step_time, Constant):
        assert len(set(times)) == 5
        assert slept(monkeypatch, factory, index=1, seed=3) != times
        assert slept(monkeypatch, factory, index=0, seed=4) != times


@pytest.mark.parametrize("step_time", [Uniform(0.5, 1.5), LogNormal(1.0), LogNormal(1.0, sigma=0.1), Constant(1.0)])
def test_step_times_have_their_mean(monkeypatch: pytest.MonkeyPatch, step_time: Duration) -> None:
    times = torch.tensor(slept(monkeypatch, EmulatedEnvs(step_time=step_time), index=0, seed=1, steps=4000))
    assert times.mean().item() == pytest.approx(step_time.mean, rel=0.1)


def test_a_step_of_a_batch_takes_one_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", times.append)
    simulator = EmulatedEnvs(num_envs=8, batched=True, step_time=Constant(0.25), reset_s=2.0).make_simulator(0)
    rows = torch.ones(8, dtype=torch.bool)
    simulator.reset(rows, torch.arange(8))
    simulator.step(torch.zeros(8, 7), rows)
    assert times == [2.0, 0.25]


def test_a_step_without_time_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the shortest sleep gives the core away and costs some 0.1 ms."""
    assert slept(monkeypatch, EmulatedEnvs(), index=0, seed=0) == []


def test_a_factory_survives_pickling() -> None:
    factory = EmulatedEnvs(step_time=LogNormal(0.02), cameras=2)
    assert pickle.loads(pickle.dumps(factory)) == factory


@pytest.mark.parametrize(
    "options",
    [
        {"state_dim": 0}, {"action_dim": 0}, {"cameras": -1}, {"image_size": 0}, {"reset_s": -1.0},
        {"reset_s": float("nan")}, {"step_time": 0.02},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"env.{next(iter(options))}="):
        EmulatedEnvs(**options)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Constant(-1.0), "Constant.seconds"), (lambda: Constant(float("inf")), "Constant.seconds"),
        (lambda: Uniform(-0.1, 1.0), "Uniform.low"), (lambda: Uniform(2.0, 1.0), "Uniform.high"),
        (lambda: LogNormal(0.0), "LogNormal.mean_s"), (lambda: LogNormal(1.0, -1.0), "LogNormal.sigma"),
        (lambda: LogNormal(1.0, float("nan")), "LogNormal.sigma"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_refused_by_name(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()


def test_the_plain_env_refuses_a_batch() -> None:
    with pytest.raises(ValueError, match="has 4"):
        EmulatedEnvBase(EmulatedEnvs(batched=True).make_simulator(0))


def test_a_chunk_of_a_torchrl_rollout_sums_its_rewards() -> None:
    env = EmulatedEnvs(chunk_size=4, max_episode_steps=10).make(0)
    rollout = env.rollout(5)
    assert rollout[keys.REWARD].flatten().tolist() == [4.0, 4.0, 2.0]
