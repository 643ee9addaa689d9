"""Random streams keyed by integers, and the seeds of episodes."""

from __future__ import annotations

import pytest
import torch

from vla_async.rng import TRAIN_SEEDS, episode_seed, evaluation_seed, fold, normal, uniform

ROWS = 100_000
KEYS = torch.arange(ROWS)  # neighbouring keys are the hard case for a hash


def test_folded_keys_never_change():
    """Seeds stand in papers and checkpoints: the same words must give the same key in every version."""
    pinned = {
        (0,): -2152535657050944081,  # the first output of the published SplitMix64 for seed 0, 0xE220A8397B1DCDAF
        (-1,): -1956407806741107680,
        ("validate",): 6551937152307390326,
        (0, "policy", 0, 0): -6716006652631029375,
        (7, "episode", 3, 11): 1288139889933562277,
    }
    assert {parts: fold(*parts) for parts in pinned} == pinned


def test_every_part_of_a_key_and_their_order_matter():
    made = [
        fold(0, "a", 1),
        fold(1, "a", 1),
        fold(0, "b", 1),
        fold(0, "a", 2),
        fold("a", 0, 1),
        fold(0, "a"),
        fold(0, "a", 1, 0),
    ]
    assert len(set(made)) == len(made)
    assert all(-(2**63) <= key < 2**63 for key in made), "keys travel as int64"


def test_many_keys_do_not_collide():
    made = {fold(seed, "policy", env, decision) for seed in range(5) for env in range(20) for decision in range(200)}
    assert len(made) == 5 * 20 * 200


def test_uniform_numbers_never_change():
    expected = [[0.883310854434967, 0.4315280318260193], [0.7497482895851135, 0.3723934292793274]]
    assert uniform(torch.tensor([0, 1]), 2).tolist() == expected


def test_uniform_stays_inside_the_open_interval_and_is_flat():
    u = uniform(KEYS, 4)
    assert u.dtype == torch.float32
    assert u.shape == (ROWS, 4)
    assert 0.0 < u.min().item() < 1e-4
    assert 1.0 - 1e-4 < u.max().item() < 1.0
    histogram = torch.histc(u, bins=20, min=0.0, max=1.0) / u.numel()
    assert (histogram - 0.05).abs().max() < 0.002  # five standard deviations are 0.0017
    assert u.double().mean().item() == pytest.approx(0.5, abs=0.003)


def test_normal_has_the_moments_and_the_tails_of_a_standard_normal():
    x = normal(KEYS, 4).double()
    assert x.mean().item() == pytest.approx(0.0, abs=0.01)
    assert x.std().item() == pytest.approx(1.0, abs=0.01)
    assert (x**3).mean().item() == pytest.approx(0.0, abs=0.05)
    assert (x**4).mean().item() == pytest.approx(3.0, abs=0.1)
    assert (x.abs() > 1.96).double().mean().item() == pytest.approx(0.05, abs=0.002)
    assert torch.isfinite(x).all()


@pytest.mark.parametrize("draw", [uniform, normal])
def test_elements_of_a_block_neighbouring_keys_and_streams_are_uncorrelated(draw):
    x = draw(KEYS, 3).double()
    columns = [*x.unbind(-1), x[:, 0].roll(1), x[:, 0].roll(2), *draw(KEYS, 3, stream=1).double().unbind(-1)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns), dtype=torch.float64)
    assert correlation.abs().max() < 0.02  # five standard deviations are 0.016


@pytest.mark.parametrize("draw", [uniform, normal])
def test_a_row_depends_on_its_own_key_alone(draw):
    keys = torch.tensor([fold(0, "policy", env) for env in range(6)])
    whole = draw(keys, 3, 2)
    assert torch.equal(draw(keys[[4, 1]], 3, 2), whole[[4, 1]])
    assert torch.equal(draw(keys.reshape(2, 3), 3, 2), whole.reshape(2, 3, 3, 2))
    assert torch.equal(draw(keys[2], 3, 2), whole[2])
    assert whole.flatten().unique().numel() == whole.numel()


@pytest.mark.parametrize("draw", [uniform, normal])
def test_the_global_generator_is_left_alone(draw):
    before = torch.get_rng_state()
    draw(KEYS[:10], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_validation_and_test_seeds_are_disjoint():
    train = {episode_seed(seed, env, episode) for seed in range(5) for env in range(50) for episode in range(100)}
    validate, test = ({evaluation_seed(split, i) for i in range(10_000)} for split in ("validate", "test"))
    assert min(train) >= 0
    assert max(train) < TRAIN_SEEDS <= min(validate)
    assert max(validate) < min(test)
    assert max(test) < 2**31, "simulators take seeds of 31 bits"
    assert len(train) > 0.999 * 5 * 50 * 100, "training episodes must not repeat"


def test_evaluation_seeds_are_consecutive_and_training_has_none():
    assert [evaluation_seed("validate", i) - evaluation_seed("validate", 0) for i in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="split='train' has no evaluation seeds"):
        evaluation_seed("train", 0)  # type: ignore[arg-type]
