"""GAE against numbers worked out by hand, and the streaming normaliser."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from vla_async import keys
from vla_async.objectives import AdvantageNormalizer, gae

GAMMA, LAMBDA = 0.9, 0.8
NAN = float("nan")


def advantages(td: TensorDict, **options: Any) -> list[float]:
    gae(td, **{"gamma": GAMMA, "gae_lambda": LAMBDA} | options)
    assert torch.equal(
        td[keys.VALUE_TARGET], torch.where(td[keys.EXECUTED].any(-1, True), td[keys.ADVANTAGE] + td[keys.VALUE], 0)
    )
    return td[keys.ADVANTAGE].flatten().tolist()


def test_the_fragment_end_bootstraps_the_value_after_it(trajectory):
    td = trajectory([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [10.0, 20.0, 30.0], [20.0, 30.0, 40.0])
    a2 = (5 + 6) + 0.9 * 40 - 30
    a1 = (3 + 4) + 0.9 * 30 - 20 + 0.9 * 0.8 * a2
    a0 = (1 + 2) + 0.9 * 20 - 10 + 0.9 * 0.8 * a1
    assert advantages(td) == pytest.approx([a0, a1, a2])


def test_termination_bootstraps_nothing_and_ends_the_recursion(trajectory):
    td = trajectory([[1.0], [3.0], [5.0]], [10.0, 20.0, 30.0], [20.0, 999.0, 40.0], terminated=(1,))
    a2 = 5 + 0.9 * 40 - 30  # the next episode
    a1 = 3 - 20
    a0 = 1 + 0.9 * 20 - 10 + 0.9 * 0.8 * a1
    assert advantages(td) == pytest.approx([a0, a1, a2])


def test_termination_ignores_a_next_value_that_was_never_written(trajectory):
    td = trajectory([[1.0], [3.0]], [10.0, 20.0], [20.0, NAN], terminated=(1,))
    assert advantages(td) == pytest.approx([1 + 0.9 * 20 - 10 + 0.9 * 0.8 * (3 - 20), 3 - 20])


def test_truncation_bootstraps_the_final_observation_not_the_next_episode(trajectory):
    # 25 is V(final observation); 30 is V(first observation of the next episode)
    td = trajectory([[1.0], [3.0], [5.0]], [10.0, 20.0, 30.0], [20.0, 25.0, 40.0], truncated=(1,))
    a2 = 5 + 0.9 * 40 - 30
    a1 = 3 + 0.9 * 25 - 20  # no a2: it belongs to another episode
    a0 = 1 + 0.9 * 20 - 10 + 0.9 * 0.8 * a1
    assert advantages(td) == pytest.approx([a0, a1, a2])


def test_rewards_after_a_success_inside_a_chunk_are_left_out(trajectory):
    executed = [[1, 1, 1], [1, 0, 0]]
    td = trajectory([[1.0, 2.0, 3.0], [4.0, 99.0, NAN]], [10.0, 20.0], [20.0, 77.0], executed=executed, terminated=(1,))
    a1 = 4 - 20
    a0 = (1 + 2 + 3) + 0.9 * 20 - 10 + 0.9 * 0.8 * a1
    assert advantages(td) == pytest.approx([a0, a1])


def test_gamma_per_env_step_discounts_inside_the_chunk_and_bootstraps_by_its_length(trajectory):
    executed = [[1, 1, 1], [1, 1, 0]]
    td = trajectory([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]], [10.0, 20.0], [20.0, 30.0], executed=executed, truncated=(1,))
    a1 = (4 + 0.9 * 5) + 0.9**2 * 30 - 20  # two env steps were executed before the clock ran out
    a0 = (1 + 0.9 * 2 + 0.9**2 * 3) + 0.9**3 * 20 - 10 + 0.9**3 * 0.8 * a1
    assert advantages(td, gamma_per="env_step") == pytest.approx([a0, a1])


def test_the_two_gammas_agree_for_chunks_of_one(trajectory):
    numbers = ([[1.0], [3.0], [5.0]], [10.0, 20.0, 30.0], [20.0, 25.0, 40.0])
    per_decision, per_env_step = trajectory(*numbers, truncated=(1,)), trajectory(*numbers, truncated=(1,))
    assert advantages(per_decision) == pytest.approx(advantages(per_env_step, gamma_per="env_step"))


def test_gamma_per_env_step_does_not_depend_on_the_chunk_length(trajectory):
    single = trajectory([[1.0], [2.0], [3.0], [4.0]], [5.0, 6.0, 7.0, 8.0], [6.0, 7.0, 8.0, 9.0])
    double = trajectory([[1.0, 2.0], [3.0, 4.0]], [5.0, 7.0], [7.0, 9.0])
    whole_return = 1 + 0.9 * 2 + 0.9**2 * 3 + 0.9**3 * 4 + 0.9**4 * 9
    for td in (single, double):
        advantages(td, gamma_per="env_step", gae_lambda=1.0)
        assert td[keys.VALUE_TARGET][0, 0].item() == pytest.approx(whole_return)


def test_padding_after_a_short_fragment_changes_nothing_whatever_it_holds(trajectory):
    short = advantages(trajectory([[1.0], [2.0]], [3.0, 4.0], [4.0, 5.0]))
    padded = trajectory([[1.0], [2.0], [NAN]], [3.0, 4.0, NAN], [4.0, 5.0, NAN], executed=[[1], [1], [0]])
    assert advantages(padded) == pytest.approx([*short, 0.0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), steps=st.integers(1, 12), gamma=st.sampled_from([0.5, 0.9, 1.0]))
def test_the_vectorised_estimate_of_torchrl_agrees(seed, steps, gamma):
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({}, batch_size=[3, steps])
    for key, shape in ((keys.STEP_REWARDS, (3, steps, 2)), (keys.VALUE, (3, steps, 1)), (keys.NEXT_VALUE, (3, steps, 1))):
        td[key] = torch.randn(shape, generator=generator)
    td[keys.EXECUTED] = torch.ones(3, steps, 2, dtype=torch.bool)
    td[keys.DONE] = torch.rand(3, steps, 1, generator=generator) < 0.3
    td[keys.TERMINATED] = td[keys.DONE] & (torch.rand(3, steps, 1, generator=generator) < 0.5)
    gae(td, gamma=gamma, gae_lambda=0.95)
    reward = td[keys.STEP_REWARDS].sum(-1, keepdim=True)
    inputs = (td[keys.VALUE], td[keys.NEXT_VALUE], reward, td[keys.DONE], td[keys.TERMINATED])
    expected, _ = vec_generalized_advantage_estimate(gamma, 0.95, *inputs)
    torch.testing.assert_close(td[keys.ADVANTAGE], expected, atol=1e-4, rtol=1e-4)


def test_decisions_without_a_time_dimension_are_refused(trajectory):
    with pytest.raises(ValueError, match=r"must be \[N, T\]"):
        gae(trajectory([[1.0]], [1.0], [1.0]).reshape(-1), gamma=0.9, gae_lambda=0.9)


# ---------------------------------------------------------------- the normaliser


def test_the_first_update_is_left_as_it_is_and_the_second_uses_the_statistics_of_the_first():
    normalizer, first, second = AdvantageNormalizer(), torch.tensor([1.0, 2.0, 6.0]), torch.tensor([3.0, 4.0])
    assert torch.equal(normalizer(first), first)
    normalizer.update(first, torch.ones(3))
    assert torch.equal(normalizer(second), second), "statistics of an unfinished update must not be used"
    normalizer.end_update()
    mean, std = (1 + 2 + 6) / 3, math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 3)
    assert normalizer(second).tolist() == pytest.approx([(3 - mean) / std, (4 - mean) / std])


@given(data=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 4)), min_size=1, max_size=20), parts=st.integers(1, 5))
def test_statistics_are_weighted_by_count_and_do_not_depend_on_the_split(data, parts):
    advantage = torch.tensor([a for a, _ in data], dtype=torch.float64)
    weight = torch.tensor([w for _, w in data])
    whole, split, repeated = AdvantageNormalizer(), AdvantageNormalizer(), advantage.repeat_interleave(weight)
    whole.update(advantage, weight)
    for a, w in zip(advantage.tensor_split(parts), weight.tensor_split(parts), strict=True):
        split.update(a, w)
    for normalizer in (whole, split):
        normalizer.end_update()
        if len(repeated):
            assert normalizer.mean == pytest.approx(repeated.mean().item(), abs=1e-9)
            assert normalizer.std == pytest.approx(repeated.std(correction=0).item(), abs=1e-6)
        else:
            assert (normalizer.mean, normalizer.std) == (0.0, 1.0)


def test_masked_advantages_do_not_enter_the_statistics_even_if_they_are_nan():
    normalizer = AdvantageNormalizer()
    normalizer.update(torch.tensor([1.0, NAN, 3.0]), torch.tensor([True, False, True]))
    normalizer.end_update()
    assert (normalizer.mean, normalizer.std) == (2.0, 1.0)


def test_the_first_success_after_nothing_but_failures_stays_bounded():
    normalizer = AdvantageNormalizer(limit=10.0)
    normalizer.update(torch.zeros(8), torch.ones(8))
    normalizer.end_update()
    assert normalizer(torch.tensor([1.0, -1.0, 0.0])).tolist() == [10.0, -10.0, 0.0]


def test_a_resumed_normaliser_continues_with_the_statistics_in_use():
    normalizer, resumed = AdvantageNormalizer(), AdvantageNormalizer()
    normalizer.update(torch.tensor([1.0, 5.0]), torch.ones(2))
    normalizer.end_update()
    state = normalizer.state_dict()
    assert all(type(value) is float for value in state.values()), "a checkpoint holds plain numbers only"
    resumed.update(torch.tensor([100.0]), torch.ones(1))  # an unfinished update that the resume throws away
    resumed.load_state_dict(state)
    resumed.end_update()
    assert torch.equal(resumed(torch.tensor([2.0])), normalizer(torch.tensor([2.0])))
