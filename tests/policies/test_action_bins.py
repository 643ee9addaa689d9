"""Bins mean the actions that OpenVLA's release means, and are drawn with the probabilities that are reported."""

from __future__ import annotations

from typing import Any

import torch

from vla_async.policies.action_bins import ActionBins, sample_bins
from vla_async.policies.processing import ActionStatistics, Normalizer


def test_sampled_bins_have_the_probabilities_of_their_log_probs():
    log_probs = torch.log_softmax(torch.tensor([0.0, 1.0, -1.0, 2.0]), dim=-1)
    drawn = sample_bins(log_probs.expand(20_000, 1, 1, 4), torch.arange(20_000))
    share = torch.bincount(drawn.flatten(), minlength=4) / 20_000
    torch.testing.assert_close(share, log_probs.exp(), atol=0.015, rtol=0.0)


def bins_of(gripper: str = "as_is", **statistics: Any) -> ActionBins:
    return ActionBins(Normalizer(ActionStatistics(mode="quantiles", eps=0.0, **statistics), 2), 256, gripper)


def test_bins_mean_the_middles_that_the_release_has():
    """bin_centers of linspace(-1, 1, 256): 255 of them, so the two highest bins are one action."""
    bins = bins_of(q01=[0.0, -1.0], q99=[10.0, 1.0])
    decoded = bins.decode(torch.tensor([[0, 0], [127, 254], [255, 255]]))
    low, high = -1.0 + 1.0 / 255.0, 1.0 - 1.0 / 255.0
    expected = torch.tensor([[5.0 * (low + 1.0), low], [5.0, high], [5.0 * (high + 1.0), high]])
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-5)


def test_encoding_undoes_decoding_and_holds_what_lies_outside():
    bins = bins_of(q01=[0.0, -1.0], q99=[10.0, 1.0])
    all_bins = torch.arange(255).unsqueeze(-1).expand(-1, 2)
    assert torch.equal(bins.encode(bins.decode(all_bins)), all_bins)
    assert bins.encode(torch.tensor([-5.0, 7.0])).tolist() == [0, 255]


def test_a_gripper_that_is_one_when_open_is_turned_round():
    bins = bins_of("open_is_one", q01=[0.0, 0.0], q99=[1.0, 1.0], mask=[True, False])
    opened, closed = bins.encode(torch.tensor([0.5, -1.0])), bins.encode(torch.tensor([0.5, 1.0]))
    assert bins.decode(opened)[-1] == -1.0
    assert bins.decode(closed)[-1] == 1.0
    assert opened[-1] == 255
    assert closed[-1] == 127
