"""V-trace against GAE, against TorchRL's, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from vla_async import keys
from vla_async.objectives import PPO, gae, vtrace

NAN = float("nan")


def with_weights(td: TensorDict, weights: list[list[float]]) -> TensorDict:
    """Sets proximal / behaviour of each action (A = 1); 0 stands for NaN, in actions that were not executed."""
    td[keys.LOG_PROB] = torch.full((1, len(weights), len(weights[0]), 1), -1.0)
    logs = [[math.log(w) - 1.0 if w else NAN for w in row] for row in weights]
    td[keys.PROXIMAL_LOG_PROB] = torch.tensor([logs]).unsqueeze(-1)
    return td


def test_the_targets_worked_out_by_hand(trajectory):
    """A chunk's weight is the product over what was executed; rho and c are capped apart; lambda decays the trace."""
    executed = [[1, 1], [1, 0], [1, 1]]
    td = trajectory([[1.0, 2.0], [3.0, NAN], [5.0, 6.0]], [10.0, 20.0, 30.0], [20.0, 30.0, 40.0], executed=executed)
    with_weights(td, [[2.0, 0.25], [4.0, 0.0], [1.2, 1.0]])
    vtrace(td, gamma=0.9, gae_lambda=0.8, rho_cap=1.5, c_cap=1.0)
    delta = [(1 + 2) + 0.9 * 20 - 10, 3 + 0.9 * 30 - 20, (5 + 6) + 0.9 * 40 - 30]
    e2 = 1.2 * delta[2]
    e1 = 1.5 * delta[1] + 0.9 * 0.8 * 1.0 * e2
    e0 = 0.5 * delta[0] + 0.9 * 0.8 * 0.5 * e1
    assert td[keys.VALUE_TARGET].flatten().tolist() == pytest.approx([10 + e0, 20 + e1, 30 + e2])
    advantage = [delta[0] + 0.9 * 0.8 * e1, delta[1] + 0.9 * 0.8 * e2, delta[2]]
    assert td[keys.ADVANTAGE].flatten().tolist() == pytest.approx(advantage)


def test_nothing_flows_from_one_episode_into_the_one_before(trajectory):
    numbers = ([[1.0], [3.0], [5.0]], [10.0, 20.0, 30.0], [20.0, NAN, 40.0])
    td = with_weights(trajectory(*numbers, terminated=(1,)), [[1.0], [0.5], [7.0]])
    vtrace(td, gamma=0.9, gae_lambda=1.0, rho_cap=2.0)
    assert td[keys.ADVANTAGE][0, 1].item() == pytest.approx(3 - 20)
    assert td[keys.VALUE_TARGET][0, 1].item() == pytest.approx(20 + 0.5 * (3 - 20))


def random_trajectories(seed: int, steps: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({}, batch_size=[3, steps])
    for key, shape in ((keys.STEP_REWARDS, (2,)), (keys.VALUE, (1,)), (keys.NEXT_VALUE, (1,)), (keys.LOG_PROB, (2, 1))):
        td[key] = torch.randn(3, steps, *shape, generator=generator)
    td[keys.PROXIMAL_LOG_PROB] = td[keys.LOG_PROB] + 0.5 * torch.randn(3, steps, 2, 1, generator=generator)
    td[keys.EXECUTED] = torch.rand(3, steps, 2, generator=generator) < 0.8
    td[keys.EXECUTED][..., 0] = True
    td[keys.DONE] = torch.rand(3, steps, 1, generator=generator) < 0.3
    td[keys.TERMINATED] = td[keys.DONE] & (torch.rand(3, steps, 1, generator=generator) < 0.5)
    following = torch.cat([td[keys.VALUE][:, 1:], td[keys.NEXT_VALUE][:, -1:]], dim=1)  # where the episode goes on
    td[keys.NEXT_VALUE] = torch.where(td[keys.DONE], td[keys.NEXT_VALUE], following)
    return td


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), steps=st.integers(1, 9), rho_cap=st.sampled_from([1.0, 2.0]))
def test_without_lambda_it_is_torchrls(seed, steps, rho_cap):
    td = random_trajectories(seed, steps)
    vtrace(td, gamma=0.9, gae_lambda=1.0, rho_cap=rho_cap, c_cap=1.0)
    executed = td[keys.EXECUTED]
    pi, mu = ((td[key].squeeze(-1) * executed).sum(-1, keepdim=True) for key in (keys.PROXIMAL_LOG_PROB, keys.LOG_PROB))
    reward = (td[keys.STEP_REWARDS] * executed).sum(-1, keepdim=True)
    inputs = (td[keys.VALUE], td[keys.NEXT_VALUE], reward, td[keys.DONE], td[keys.TERMINATED])
    weighted, target = vtrace_advantage_estimate(0.9, pi, mu, *inputs, rho_thresh=rho_cap, c_thresh=1.0)
    torch.testing.assert_close(td[keys.VALUE_TARGET], target, atol=1e-4, rtol=1e-4)
    rho = (pi - mu).exp().clamp(max=rho_cap)
    torch.testing.assert_close(td[keys.ADVANTAGE] * rho, weighted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gamma_per", ["decision", "env_step"])
def test_on_fresh_data_it_is_gae(gamma_per):
    td = random_trajectories(0, 8)
    td[keys.PROXIMAL_LOG_PROB] = td[keys.LOG_PROB].clone()
    expected = gae(td.clone(), gamma=0.9, gae_lambda=0.7, gamma_per=gamma_per)
    vtrace(td, gamma=0.9, gae_lambda=0.7, gamma_per=gamma_per, rho_cap=2.0)
    for key in (keys.ADVANTAGE, keys.VALUE_TARGET):
        torch.testing.assert_close(td[key], expected[key])


def test_padding_changes_nothing_whatever_it_holds():
    """The last decision of a padded fragment bootstraps its own next value, not the padding's."""
    short, padded = random_trajectories(1, 4), random_trajectories(1, 4)
    padded = torch.cat([padded, padded[:, :2].clone()], dim=1)
    padded[keys.EXECUTED][:, 4:] = False
    for key in (keys.STEP_REWARDS, keys.VALUE, keys.NEXT_VALUE, keys.LOG_PROB, keys.PROXIMAL_LOG_PROB):
        padded[key][:, 4:] = NAN
    for td in (short, padded):
        vtrace(td, gamma=0.9, gae_lambda=0.8)
    for key in (keys.ADVANTAGE, keys.VALUE_TARGET):
        assert torch.equal(padded[key][:, :4], short[key])
        assert not padded[key][:, 4:].any()


def test_a_proximal_log_prob_that_is_missing_is_refused():
    td = random_trajectories(0, 3)
    del td[keys.PROXIMAL_LOG_PROB]
    with pytest.raises(ValueError, match=r"call objective.recompute before objective.prepare"):
        PPO(correction="vtrace").prepare(td)
