"""Every form in which TorchRL lets weights be given reaches the replicas, before the first decision and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, take
from vla_async.collectors import StreamingCollector

FORMS = ["positional", "weights", "policy", "weights_dict"]


def give(collector: StreamingCollector, form: str, push: float) -> None:
    """Hand over weights that are not those of the collector's own policy."""
    other = Pusher()
    other.push.data.fill_(push)
    weights: Any = other if form == "policy" else TensorDict.from_module(other).data
    if form == "positional":
        collector.update_policy_weights_(weights)
    else:
        collector.update_policy_weights_(**{form: {"policy": weights} if form == "weights_dict" else weights})


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_form_decide_from_the_first_decision_on(form: str) -> None:
    """A form that is dropped lets the policy's own weights act, labelled as if they were newer ones."""
    with collecting([CounterEnv], Pusher(), frames_per_batch=4, max_in_flight=1) as collector:
        give(collector, form, 5.0)
        give(collector, form, 6.0)
        first = take(collector, 1)[0]
        assert torch.equal(first["action"], torch.full_like(first["action"], 7.0))  # one more: it explores
        assert first["policy_version"].unique().tolist() == [2]
        give(collector, form, 8.0)
        second = take(collector, 1)[0]
        assert torch.equal(second["action"], torch.full_like(second["action"], 9.0))
        assert second["policy_version"].unique().tolist() == [3]


def test_weights_for_some_workers_are_refused() -> None:
    """They would silently go to all of them."""
    with collecting([CounterEnv], Pusher(), frames_per_batch=4) as collector, pytest.raises(ValueError, match="worker_ids"):
        collector.update_policy_weights_(Pusher(), worker_ids=[0])


def test_a_policy_without_weights_can_be_updated() -> None:
    """TorchRL's trainer updates whatever it has; if that counted, all that is collected would be dropped as too old."""
    with collecting([CounterEnv], None, frames_per_batch=4, max_in_flight=1) as collector:
        for _ in range(2):
            collector.update_policy_weights_()
            assert take(collector, 1)[0].numel() == 4
        assert collector.policy_version == 0
