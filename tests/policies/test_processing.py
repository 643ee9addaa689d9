"""Statistics, normalisation, padding, discretisation and prompts, against numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from vla_async.policies.processing import (
    ActionStatistics,
    Normalizer,
    StateStatistics,
    Statistics,
    discretize,
    pad_last,
    read_statistics,
)

MODES = {
    "mean_std": {"mean": [1.0, -2.0], "std": [2.0, 0.5]},
    "quantiles": {"q01": [0.0, -1.0], "q99": [10.0, 3.0]},
    "min_max": {"min": [-4.0, 0.0], "max": [4.0, 0.5]},
    "identity": {},
}


def normalizer(mode: str, **options) -> Normalizer:
    return Normalizer(ActionStatistics(mode=mode, eps=0.0, **MODES[mode]), 2, **options)


@pytest.mark.parametrize(
    ("mode", "x", "expected"),
    [
        ("mean_std", [5.0, -3.0], [2.0, -2.0]),
        ("quantiles", [5.0, 3.0], [0.0, 1.0]),
        ("quantiles", [-5.0, -1.0], [-2.0, -1.0]),
        ("min_max", [2.0, 0.0], [0.5, -1.0]),
        ("identity", [5.0, -3.0], [5.0, -3.0]),
    ],
)
def test_normalised_numbers_are_those_worked_out_by_hand(mode, x, expected):
    torch.testing.assert_close(normalizer(mode).normalize(torch.tensor(x)), torch.tensor(expected))


@pytest.mark.parametrize("mode", MODES)
def test_unnormalising_undoes_normalising(mode):
    x = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0)) * 4.0
    one = normalizer(mode)
    torch.testing.assert_close(one.unnormalize(one.normalize(x)), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 1e-8])
def test_eps_stands_where_the_releases_have_it(eps):
    """OpenVLA and openpi: 2 (x - q01) / (q99 - q01 + eps) - 1, and (x - mean) / (std + eps)."""
    x, low, high = np.array([0.02, 0.5]), np.array([0.0, 0.1]), np.array([1e-5, 0.7])
    made = Normalizer(StateStatistics(mode="quantiles", q01=low, q99=high, eps=eps), 2).normalize(torch.tensor(x))
    np.testing.assert_allclose(made.numpy(), 2 * (x - low) / (high - low + eps) - 1, rtol=1e-4)
    made = Normalizer(StateStatistics(mode="mean_std", mean=low, std=high, eps=eps), 2).normalize(torch.tensor(x))
    np.testing.assert_allclose(made.numpy(), (x - low) / (high + eps), rtol=1e-4)


def test_masked_elements_stay_as_they_are():
    one = Normalizer(ActionStatistics(mode="quantiles", q01=[0.0, 0.0], q99=[10.0, 1.0], mask=[True, False]), 2)
    torch.testing.assert_close(one.unnormalize(torch.tensor([0.0, 0.7])), torch.tensor([5.0, 0.7]), atol=1e-5, rtol=1e-5)


def test_constant_elements_give_their_constant_back_and_can_be_clipped():
    statistics = StateStatistics(mode="min_max", min=[3.0], max=[3.0])
    torch.testing.assert_close(Normalizer(statistics, 1).unnormalize(torch.tensor([0.9])), torch.tensor([3.0]))
    assert Normalizer(statistics, 1).normalize(torch.tensor([4.0])) > 1e5
    assert Normalizer(statistics, 1, clip=5.0).normalize(torch.tensor([4.0])) == 5.0


def test_the_numbers_travel_in_the_state_dict():
    """A checkpoint's statistics must win over those that the module was built with."""
    source, target = normalizer("quantiles"), Normalizer(ActionStatistics(mode="identity"), 2)
    target.load_state_dict(source.state_dict())
    x = torch.tensor([[5.0, 1.0]])
    torch.testing.assert_close(target.normalize(x), source.normalize(x))


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"mode": "quantiles", "q01": [0.0]}, "'q99' is missing"),
        ({"mode": "mean_std", "mean": [0.0], "std": [float("nan")]}, "'std' is not finite in elements \\[0\\]"),
        ({"mode": "mean_std", "mean": [0.0, 1.0], "std": [1.0]}, "lengths differ: {'mean': 2, 'std': 1}"),
        ({"mode": "min_max", "min": [0.0, 2.0], "max": [1.0, 1.0]}, "'max' is below 'min' in elements \\[1\\]"),
        ({"mode": "mean_std", "mean": [0.0], "std": [-1.0]}, "'std' is negative in elements \\[0\\]"),
        ({"mode": "quantiles", "q01": [0.0], "q99": [1.0], "mask": [True, False]}, "lengths differ"),
        ({"mode": "q99"}, "mode='q99' is unknown"),
        ({}, "no 'mode' is given"),
        ({"mode": "identity", "eps": -1.0}, "eps=-1.0"),
    ],
)
def test_bad_statistics_are_refused_by_name(plain, said):
    with pytest.raises(ValueError, match=f"the action statistics: .*{said}"):
        ActionStatistics.from_dict(plain)


def test_statistics_of_another_length_are_refused_by_name():
    with pytest.raises(ValueError, match="the state statistics have 1 elements, but 3 are needed"):
        Normalizer(StateStatistics(mode="min_max", min=[0.0], max=[1.0]), 3)
    with pytest.raises(ValueError, match="the action has 3 elements, but its statistics have 2"):
        normalizer("identity").normalize(torch.zeros(1, 3))


def test_to_dict_and_from_dict_are_inverse_and_plain():
    for mode, fields in MODES.items():
        one = StateStatistics(mode=mode, mask=(True, False), **fields)
        plain = json.loads(json.dumps(one.to_dict()))
        assert StateStatistics.from_dict(plain) == one


def test_fields_that_the_mode_does_not_need_are_left_aside():
    plain = {"q01": [0.0], "q99": [1.0], "mean": [float("nan")], "num_trajectories": 3}
    assert ActionStatistics.from_dict(plain, "quantiles") == ActionStatistics(mode="quantiles", q01=(0.0,), q99=(1.0,))


def test_measured_statistics_are_those_of_numpy():
    values = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    array = values.double().numpy()
    assert np.allclose(Statistics.measure(values, "mean_std").std, array.std(0))
    assert np.allclose(Statistics.measure(values, "quantiles").q99, np.quantile(array, 0.99, axis=0))
    assert np.allclose(Statistics.measure(values, "min_max").min, array.min(0))
    assert Statistics.measure(values, "identity") == Statistics(mode="identity")


@pytest.mark.parametrize("mode", ["mean_std", "quantiles", "min_max"])
def test_what_did_not_move_in_the_demonstrations_does_not_explode_when_it_does(mode):
    """A gripper that was always open would be a million as soon as it closes, and nothing else would count."""
    still = torch.full((50, 1), 0.04) + 1e-6 * torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    measured = Normalizer(Statistics.measure(still, mode), 1)
    torch.testing.assert_close(
        measured.normalize(torch.tensor([[0.04], [0.54]])), torch.tensor([[0.0], [0.5]]), atol=1e-4, rtol=0
    )


def test_bounds_become_minus_one_and_one_and_must_be_finite():
    one = Normalizer(ActionStatistics.of_bounds([-2.0, 0.0], [2.0, 1.0]), 2)
    torch.testing.assert_close(one.unnormalize(torch.tensor([-1.0, 1.0])), torch.tensor([-2.0, 1.0]))
    with pytest.raises(ValueError, match="unbounded"):
        ActionStatistics.of_bounds([-float("inf")], [1.0])
    with pytest.raises(ValueError, match="elements \\[0\\] are constant and eps is 0"):
        Normalizer(ActionStatistics.of_bounds([1.0], [1.0]), 1)


def test_a_file_of_statistics_is_read_by_name(tmp_path):
    file = tmp_path / "dataset_statistics.json"
    file.write_text(json.dumps({"libero_spatial": {"action": {"q01": [0.0], "q99": [1.0]}}}))
    assert read_statistics(file, "libero_spatial", "action") == {"q01": [0.0], "q99": [1.0]}
    with pytest.raises(ValueError, match="no 'libero_goal'; there is \\['libero_spatial'\\]"):
        read_statistics(file, "libero_goal", "action")
    with pytest.raises(ValueError, match="no statistics at"):
        read_statistics(tmp_path / "other.json")
    with pytest.raises(ValueError, match="holds no statistics by name"):
        read_statistics(file, "libero_spatial", "action", "q01")


def test_padding_appends_zeros_and_refuses_what_is_too_long():
    assert pad_last(torch.tensor([[1.0, 2.0]]), 4).tolist() == [[1.0, 2.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="the state has 2 elements, but the model has room for 1"):
        pad_last(torch.zeros(1, 2), 1, "the state")


def test_bins_are_those_of_numpys_digitize():
    """π0.5 was trained on prompts whose numbers come from this formula, -1 below the range included."""
    x = torch.cat([torch.linspace(-1.2, 1.2, 1001), torch.linspace(-1.0, 1.0, 257)])
    expected = np.digitize(x.numpy(), bins=np.linspace(-1, 1, 257)[:-1]) - 1
    assert discretize(x, 256).tolist() == expected.tolist()
    assert discretize(torch.tensor([-1.5, -1.0, 0.0, 1.0, 9.0]), 256).tolist() == [-1, 0, 128, 255, 255]
