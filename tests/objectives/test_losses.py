"""The pure functions, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_async.objectives import losses

NAN = float("nan")


def surrogate(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float]:
    """Loss and its gradient with respect to the log-prob, at clip 0.2 and 0.3."""
    log_ratio = torch.tensor(math.log(ratio), requires_grad=True)
    loss = losses.clipped_surrogate(log_ratio, torch.tensor(advantage), 0.2, 0.3, dual_clip)
    (gradient,) = torch.autograd.grad(loss, log_ratio)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -1.1 * 2, -1.1 * 2),  # inside
        (1.5, 2.0, -1.3 * 2, 0.0),  # moved far enough up: clipped at 1 + clip_high
        (0.5, 2.0, -0.5 * 2, -0.5 * 2),  # moved the wrong way: never clipped
        (0.5, -2.0, 0.8 * 2, 0.0),  # moved far enough down: clipped at 1 - clip_low
        (1.5, -2.0, 1.5 * 2, 1.5 * 2),  # moved the wrong way: never clipped
    ],
)
def test_the_surrogate_clips_each_side_with_its_own_bound(ratio, advantage, loss, gradient):
    assert surrogate(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-5)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.1, 2.0), (1.5, 2.0), (0.5, 2.0), (0.5, -2.0), (1.5, -2.0)])
def test_the_clip_fraction_counts_exactly_the_elements_without_gradient(ratio, advantage):
    clipped = losses.is_clipped(torch.tensor(math.log(ratio)), torch.tensor(advantage), 0.2, 0.3)
    assert clipped.item() == (surrogate(ratio, advantage)[1] == 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 3.0 * 2, 0.0),  # bounded
        (2.5, -2.0, 2.5 * 2, 2.5 * 2),  # below the bound: as without
        (0.5, -2.0, 0.8 * 2, 0.0),  # clipped at 1 - clip_low, as without
        (5.0, 2.0, -1.3 * 2, 0.0),  # a positive advantage knows no second bound
    ],
)
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage(ratio, advantage, loss, gradient):
    assert surrogate(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient), rel=1e-5)
    clipped = losses.is_clipped(torch.tensor(math.log(ratio)), torch.tensor(advantage), 0.2, 0.3, 3.0)
    assert clipped.item() == (gradient == 0.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_a_ratio_that_would_overflow_gives_finite_gradients(log_ratio, advantage):
    x = torch.tensor(log_ratio, requires_grad=True)
    loss = losses.clipped_surrogate(x, torch.tensor(advantage), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, x)
    assert math.isfinite(loss.item())
    assert math.isfinite(gradient.item())
    assert math.isfinite(losses.approx_kl(x).item())


@pytest.mark.parametrize(
    ("correction", "weight", "log_ratio", "loss_weight"),
    [
        ("truncated_is", 1.5, math.log(1.1) + math.log(1.5), 1.0),  # below the cap: the whole ratio
        ("truncated_is", 9.0, math.log(1.1) + math.log(2.0), 1.0),  # its old part counts 2 at most
        ("truncated_is", 0.1, math.log(1.1) + math.log(0.1), 1.0),  # small weights are left alone
        ("decoupled", 1.5, math.log(1.1), 1.5),
        ("decoupled", 9.0, math.log(1.1), 2.0),
        ("decoupled", 0.1, math.log(1.1), 0.1),
        ("vtrace", 9.0, math.log(1.1), 2.0),
    ],
)
def test_a_correction_caps_the_weight_and_places_it(correction, weight, log_ratio, loss_weight):
    got = losses.correct(torch.tensor(math.log(1.1)), torch.tensor(math.log(weight)), correction, 2.0)
    assert [x.item() for x in got] == pytest.approx([log_ratio, loss_weight])


def test_levels_sum_what_was_executed_only():
    elements = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [NAN, NAN]], [[NAN, NAN], [NAN, NAN]]])
    executed = torch.tensor([[True, True], [True, False], [False, False]])
    chunk = losses.reduce_to_level(elements, executed, "chunk")
    assert chunk.tolist() == [1 + 2 + 3 + 4, 5 + 6, 0]
    assert losses.reduce_to_level(elements, executed, "action").tolist() == [[1 + 2, 3 + 4], [5 + 6, 0], [0, 0]]
    token = losses.reduce_to_level(elements, executed, "token")
    assert token.tolist() == [[[1, 2], [3, 4]], [[5, 6], [0, 0]], [[0, 0], [0, 0]]]
    counts = {level: int(losses.valid_elements(executed, 2, level).sum()) for level in ("token", "action", "chunk")}
    assert counts == {"token": 6, "action": 3, "chunk": 2}
    for level, reduced in (("token", token), ("chunk", chunk)):
        assert losses.valid_elements(executed, 2, level).shape == reduced.shape


def test_a_masked_nan_reaches_no_gradient():
    elements = torch.tensor([[[1.0], [NAN]]], requires_grad=True)
    losses.reduce_to_level(elements, torch.tensor([[True, False]]), "chunk").sum().backward()
    assert elements.grad.flatten().tolist() == [1.0, 0.0]


def test_value_loss_squared_huber_and_clipped():
    value, old, target = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0])
    assert losses.value_loss(value, old, target).item() == 0.5 * 3**2
    assert losses.value_loss(value, old, target, huber_delta=1.0).item() == 1.0 * (3 - 0.5 * 1.0)
    assert losses.value_loss(value, old, target, huber_delta=5.0).item() == 0.5 * 3**2
    # away from the target the unclipped loss is the larger one
    assert losses.value_loss(value, old, target, clip=0.5).item() == 0.5 * 3**2
    # towards the target by more than the clip: the loss stays that of 1 + 0.5, and its gradient vanishes
    near, far = torch.tensor([3.0], requires_grad=True), torch.tensor([4.0])
    loss = losses.value_loss(near, old, far, clip=0.5)
    assert loss.item() == 0.5 * (4 - 1.5) ** 2
    assert torch.autograd.grad(loss, near)[0].item() == 0.0


@given(st.floats(-3, 3))
def test_approx_kl_is_never_negative_and_zero_only_for_equal_policies(log_ratio):
    kl = losses.approx_kl(torch.tensor(log_ratio, dtype=torch.float64)).item()
    assert kl == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, abs=1e-12)
    assert kl >= 0.0


def test_approx_kl_estimates_the_divergence_of_two_gaussians():
    behaviour, current = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.3, 1.2)
    torch.manual_seed(0)
    x = behaviour.sample((200_000,))
    estimate = losses.approx_kl(current.log_prob(x) - behaviour.log_prob(x)).mean()
    assert estimate.item() == pytest.approx(torch.distributions.kl_divergence(behaviour, current).item(), abs=3e-3)


def test_explained_variance_from_means_equals_the_direct_one():
    torch.manual_seed(0)
    target = torch.randn(1000, dtype=torch.float64)
    value = 0.7 * target + 0.2 * torch.randn(1000, dtype=torch.float64) + 5.0  # a constant offset does not count
    error = target - value
    means = [x.mean().item() for x in (error, error**2, target, target**2)]
    direct = 1 - error.var(correction=0) / target.var(correction=0)
    assert losses.explained_variance(*means) == pytest.approx(direct.item(), abs=1e-9)
    assert math.isnan(losses.explained_variance(0.0, 1.0, 2.0, 4.0)), "targets that do not vary explain nothing"
