"""Flow-SDE and Flow-Noise against closed forms: a Gaussian target, whose velocity is known, and torch's own densities.

With a Gaussian target every denoising step is an affine map, so the moments of what any number of steps makes can be
computed exactly, by matrices, without sampling. That tells apart three things: the formulas, their discretisation and
sampling error.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_async.policies.flow_exploration import FlowNoise, FlowODE, FlowSDE, FlowShape, Sampled
from vla_async.policies.flow_sampling import Draws

HORIZON, MODEL_DIM, H, A = 2, 2, 1, 2  # of four elements, two are executed and get noise
D = HORIZON * MODEL_DIM
EXECUTED = torch.tensor([True, True, False, False])
NOISE_LEVEL = 0.5


@dataclass(frozen=True)
class Target:
    """A correlated Gaussian, and the flow from standard noise to it, in double precision."""

    mean: Tensor
    covariance: Tensor

    def velocity(self, t: float) -> tuple[Tensor, Tensor]:
        """Matrix and offset of the velocity ``E[noise - action | x_t]``, which is affine in ``x_t``."""
        eye = torch.eye(D, dtype=torch.float64)
        inverse = torch.linalg.inv((1 - t) ** 2 * self.covariance + t**2 * eye)
        matrix = (t * eye - (1 - t) * self.covariance) @ inverse
        return matrix, -self.mean - (1 - t) * matrix @ self.mean

    def field(self, x_t: Tensor, t: Tensor) -> tuple[Tensor, None]:
        """The velocity as a policy gives it: float32, a time for each row."""
        out = torch.empty_like(x_t)
        for time in t.unique().tolist():
            rows = t == time
            matrix, offset = self.velocity(time)
            out[rows] = (x_t[rows].flatten(1).double() @ matrix.T + offset).float().reshape(-1, HORIZON, MODEL_DIM)
        return out, None


def make_target() -> Target:
    root = torch.randn(D, D, generator=torch.Generator().manual_seed(3)).double() * 0.4
    return Target(torch.tensor([0.5, -1.0, 0.25, 2.0]).double(), root @ root.T + 0.1 * torch.eye(D).double())


def exact_moments(target: Target, num_steps: int, stochastic: int | None) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the chunk when step ``stochastic`` has noise; None for the ODE.

    The stochastic step is written as the Euler-Maruyama step of ``dx = [v + σ²/2 · x_1 / t] dt + σ dw`` backwards in time,
    with ``x_1 / t`` minus the score, which is where πRL's formula comes from.
    """
    mean, covariance = torch.zeros(D).double(), torch.eye(D).double()
    eye, delta = torch.eye(D).double(), 1.0 / num_steps
    for step in range(num_steps):
        t = 1.0 - step / num_steps
        matrix, offset = target.velocity(t)
        push, shift, added = eye - delta * matrix, -delta * offset, torch.zeros(D, D).double()
        if step == stochastic:
            sigma_2 = NOISE_LEVEL**2 * t / max(1.0 - t, delta)
            noise_matrix, noise_offset = eye + (1 - t) * matrix, (1 - t) * offset  # x_1 = x_t + (1 - t) v
            scale = torch.diag(EXECUTED.double()) * sigma_2 * delta
            push, shift = push - scale @ noise_matrix / (2 * t), shift - scale @ noise_offset / (2 * t)
            added = scale
        mean, covariance = push @ mean + shift, push @ covariance @ push.T + added
    return mean, covariance


@torch.no_grad()
def sample(exploration: FlowSDE | FlowODE | FlowNoise, target: Target, rows: int, seed: int = 0) -> Sampled:
    keys = torch.arange(rows) + 10**6 * seed
    return exploration.sample(target.field, Draws(rows, torch.device("cpu"), keys), explore=True)


def assert_moments(x: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Within five standard errors of the sample's moments."""
    x, rows = x.double(), len(x)
    variance = covariance.diagonal()
    assert ((x.mean(0) - mean).abs() < 5 * (variance / rows).sqrt()).all(), (x.mean(0), mean)
    error = ((variance[:, None] * variance + covariance**2) / rows).sqrt()
    assert ((torch.cov(x.T) - covariance).abs() < 5 * error).all(), (torch.cov(x.T), covariance)


def shape(num_steps: int) -> FlowShape:
    return FlowShape(HORIZON, MODEL_DIM, H, A, num_steps)


@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_each_step_of_the_sde_has_the_moments_of_its_matrices(num_steps):
    """A wrong drift, variance or time at any step would show in the chunks that had their noise there."""
    target = make_target()
    sampled = sample(FlowSDE(shape(num_steps), NOISE_LEVEL), target, 8000 * num_steps)
    chosen = sampled.stored["vla_action", "step_index"].squeeze(-1)
    for step in range(num_steps):
        chunk = sampled.chunk[chosen == step].flatten(1)
        assert len(chunk) > 7000, "every step is drawn equally often"
        mean, covariance = exact_moments(target, num_steps, step)
        assert_moments(chunk, mean[EXECUTED], covariance[EXECUTED][:, EXECUTED])


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10, 64])
def test_the_mean_of_the_sde_is_exactly_the_odes_and_the_targets(num_steps):
    """On the ODE's path the expected noise has mean zero, so its part of the drift cancels for any number of steps."""
    target = make_target()
    for stochastic in (None, *range(num_steps)):
        mean, _ = exact_moments(target, num_steps, stochastic)
        torch.testing.assert_close(mean, target.mean, atol=1e-12, rtol=0)


def test_the_covariance_of_the_sde_becomes_the_odes_and_the_targets():
    """For finitely many steps they differ; a marginal that is not kept would leave a difference that does not vanish."""
    target = make_target()
    gaps, errors = [], []
    for num_steps in (8, 16, 32, 64, 128):
        _, ode = exact_moments(target, num_steps, None)
        by_step = torch.stack([exact_moments(target, num_steps, step)[1] for step in range(num_steps)])
        gaps.append((by_step.mean(0) - ode).norm().item())
        errors.append((ode - target.covariance).norm().item())
    for larger, smaller in [*itertools.pairwise(gaps), *itertools.pairwise(errors)]:
        assert smaller < 0.6 * larger, (gaps, errors)  # of first order: halved when the steps are
    assert gaps[-1] < 0.01 * target.covariance.norm()


def test_the_sampled_chunks_are_the_odes_within_sampling_error():
    target, rows, num_steps = make_target(), 20_000, 64
    of_ode = sample(FlowODE(shape(num_steps)), target, rows, seed=1).chunk.flatten(1)
    of_sde = sample(FlowSDE(shape(num_steps), NOISE_LEVEL), target, rows, seed=2).chunk.flatten(1)
    assert not torch.equal(of_ode, of_sde)
    mean, covariance = target.mean[EXECUTED], exact_moments(target, num_steps, None)[1][EXECUTED][:, EXECUTED]
    for chunk in (of_ode, of_sde):
        assert_moments(chunk, mean, covariance)


def test_what_is_not_executed_follows_the_ode():
    """Noise in it would be missing in the log-prob."""
    target, exploration = make_target(), FlowSDE(shape(4), NOISE_LEVEL)
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(x_t: Tensor, t: Tensor) -> tuple[Tensor, None]:
        velocity, _ = target.field(x_t, t)
        seen.append((x_t.flatten(1), velocity.flatten(1)))
        return velocity, None

    exploration.sample(spy, Draws(32, torch.device("cpu"), torch.arange(32)), explore=True)
    moved = 0
    for (x, velocity), (following, _) in itertools.pairwise(seen):
        step = following - (x - velocity / 4)
        torch.testing.assert_close(step[:, ~EXECUTED], torch.zeros(32, 2), atol=1e-6, rtol=0)
        moved += int((step[:, EXECUTED].abs() > 1e-3).any(-1).sum())
    assert 10 < moved < 32, "one step of each row has noise, of which the last one is not seen here"


def test_the_log_prob_of_flow_sde_is_that_of_torch():
    """Row by row, in plain numbers."""
    target, num_steps = make_target(), 5
    exploration = FlowSDE(shape(num_steps), NOISE_LEVEL)
    sampled = sample(exploration, target, 40)
    stored, entropies = sampled.stored, []
    for row in range(40):
        step = int(stored["vla_action", "step_index"][row])
        x_t, x_next = stored["vla_action", "x_t"][row].flatten().double(), stored["vla_action", "x_next"][row].flatten()
        t, delta = 1.0 - step / num_steps, 1.0 / num_steps
        matrix, offset = target.velocity(t)
        velocity = matrix @ x_t + offset
        sigma_2 = NOISE_LEVEL**2 * t / ((1.0 - t) if step else delta)
        action, noise = x_t - t * velocity, x_t + (1.0 - t) * velocity
        mean = action * (1.0 - t + delta) + noise * (t - delta - sigma_2 * delta / (2.0 * t))
        normal = torch.distributions.Normal(mean[EXECUTED], math.sqrt(sigma_2 * delta))
        torch.testing.assert_close(
            sampled.log_prob[row].flatten(), normal.log_prob(x_next.double()).float(), atol=1e-5, rtol=1e-5
        )
        entropies.append(normal.entropy().float())
    again = exploration.recompute(target.field, TensorDict(stored, batch_size=[40]))
    torch.testing.assert_close(again.entropy.flatten(1), torch.stack(entropies), atol=1e-6, rtol=1e-6)


def recompute_path(target: Target, path: Tensor, stds: list[float]) -> Tensor:
    """The mean of the K + 1 log-densities of a path ``[K + 1, H', A']``, by torch's distributions."""
    num_steps = len(path) - 1
    terms = [torch.distributions.Normal(0.0, 1.0).log_prob(path[0].flatten()[EXECUTED].double())]
    for step, std in enumerate(stds):
        matrix, offset = target.velocity(1.0 - step / num_steps)
        x = path[step].flatten().double()
        mean = x - (matrix @ x + offset) / num_steps
        following = path[step + 1].flatten()[EXECUTED].double()
        terms.append(torch.distributions.Normal(mean[EXECUTED], std).log_prob(following))
    return torch.stack(terms).mean(0).float()


def test_the_log_prob_of_flow_noise_is_the_mean_of_its_terms_by_torch():
    target, num_steps = make_target(), 3
    exploration = FlowNoise(shape(num_steps), (0.1, 0.4), None, [8])
    with torch.no_grad():
        exploration.std_logit.copy_(torch.tensor([[-1.0, -1.0], [0.0, 0.0], [2.0, 2.0]]))
    stds = [0.1 * 4.0 ** torch.sigmoid(torch.tensor(logit)).item() for logit in (-1.0, 0.0, 2.0)]
    sampled = sample(exploration, target, 20)
    paths = sampled.stored["vla_action", "path"]
    expected = torch.stack([recompute_path(target, path, stds) for path in paths])
    torch.testing.assert_close(sampled.log_prob.flatten(1), expected, atol=1e-5, rtol=1e-5)
    again = exploration.recompute(target.field, TensorDict(sampled.stored, batch_size=[20]))
    entropy = sum(torch.distributions.Normal(0.0, std).entropy() for std in (1.0, *stds)) / (num_steps + 1)
    torch.testing.assert_close(again.entropy, entropy.expand_as(again.entropy), atol=1e-6, rtol=1e-6)


def test_the_deviation_of_flow_noise_is_learned_within_its_limits():
    """Maximising the likelihood of chunks that vary more than the policy thinks raises it, by gradients that reach it."""
    target, num_steps = make_target(), 3
    wide, learner = (FlowNoise(shape(num_steps), limits, None, []) for limits in ((0.29, 0.31), (0.1, 0.4)))
    td = TensorDict(sample(wide, target, 500).stored, batch_size=[500])
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (-learner.recompute(target.field, td).log_prob.mean()).backward()
        optimizer.step()
    stds = torch.stack([learner._std(step, None) for step in range(num_steps)])
    torch.testing.assert_close(stds, torch.full((num_steps, A), 0.3), atol=0.03, rtol=0)
