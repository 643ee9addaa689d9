"""Which weights made a decision: never two versions at once, never another than its label says, however they came."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from tests.collectors.rollout_fakes import CounterEnv, Pusher, TwoParameters, collecting, take
from tests.fakes import ClockEnvs
from vla_async import keys
from vla_async.collectors import StreamingCollector

ENVS = [partial(CounterEnv, number) for number in range(2)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_decision_is_made_with_torn_or_mislabelled_weights(replicas: int) -> None:
    """The learner changes its own module in place all the time, and publishes as fast as it can.

    The action shows both parameters, read at different times; each must be of the version that stands beside them.
    """
    policy = TwoParameters(pause_s=0.001, size=20_000)
    envs = ClockEnvs(num_envs=3)
    with collecting(envs, policy, frames_per_batch=12, max_in_flight=3, policy_devices=["cpu"] * replicas) as collector:
        seen = set[int]()
        for number, batch in enumerate(collector):
            versions = batch[keys.POLICY_VERSION].unsqueeze(-1).expand_as(batch[keys.CHUNK])
            torch.testing.assert_close(batch[keys.CHUNK], versions.float(), rtol=0, atol=0)
            seen |= set(batch[keys.POLICY_VERSION].flatten().tolist())
            if number == 25:
                break
            for _ in range(2):
                policy.set(collector.policy_version + 1.0)
                collector.update_policy_weights_()
                policy.set(-7.0)  # nobody may see this, for it is not published
                policy.set(collector.policy_version)
        assert collector.policy_version == 50
        assert len(seen) > 10, "the replicas hardly ever changed over, so nothing was tested"


def pushes(batch: TensorDictBase) -> dict[int, set[float]]:
    """The actions in a batch (less what exploring adds), by the version that made them."""
    pairs = zip(batch["policy_version"].flatten().tolist(), (batch["action"] - 1.0).flatten().tolist(), strict=True)
    found: dict[int, set[float]] = {}
    for version, push in pairs:
        found.setdefault(version, set()).add(push)
    return found


@pytest.fixture(scope="module")
def shared() -> StreamingCollector:  # type: ignore[misc]
    with collecting(ENVS, Pusher(), frames_per_batch=4, max_in_flight=1) as collector:
        take(collector, 1)
        yield collector


def module(push: float) -> Pusher:
    other = Pusher()
    other.push.data.fill_(push)
    return other


FORMS = {
    "module": lambda push: ((module(push),), {}),
    "policy=": lambda push: ((), {"policy": module(push)}),
    "tensordict": lambda push: ((TensorDict.from_module(module(push)).data,), {}),
    "state_dict": lambda push: ((module(push).state_dict(),), {}),
    "weights=": lambda push: ((), {"weights": {"push": torch.tensor(push), "offset": torch.tensor(0.0)}}),
    "weights_dict=": lambda push: ((), {"weights_dict": {"policy": module(push).state_dict()}}),
    "model_id=": lambda push: ((module(push),), {"model_id": "policy"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_taken_in_every_form(shared: StreamingCollector, form: str) -> None:
    """With M = 1 no env decides while the consumer has a batch, so the next batch is wholly of the new version."""
    version, push = shared.policy_version + 1, 2.0 + len(form)
    arguments, named = FORMS[form](push)
    shared.update_policy_weights_(*arguments, **named)
    assert pushes(take(shared, 1)[0]) == {version: {push}}


def test_no_argument_publishes_the_own_policy(shared: StreamingCollector) -> None:
    """TorchRL's ``UpdateWeights`` hook calls it bare."""
    policy = shared.policy
    assert isinstance(policy, Pusher)
    with torch.no_grad():
        policy.push.fill_(5.0)
        policy.offset.fill_(0.25)
    shared.update_policy_weights_()
    assert pushes(take(shared, 1)[0]) == {shared.policy_version: {5.25}}
    policy.offset.zero_()


def test_weights_that_do_not_fit_are_refused_and_change_nothing(shared: StreamingCollector) -> None:
    before = shared.policy_version
    with pytest.raises(ValueError, match="lack"):
        shared.update_policy_weights_({"pull": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"shape \[3\]"):
        shared.update_policy_weights_({"push": torch.zeros(3), "offset": torch.tensor(0.0)})
    with pytest.raises(KeyError, match="critic"):
        shared.update_policy_weights_(Pusher(), model_id="critic")
    with pytest.raises(ValueError, match="worker_ids"):
        shared.update_policy_weights_(Pusher(), worker_ids=1)
    assert shared.policy_version == before


def test_what_was_published_outlives_a_restart() -> None:
    """Else a decision after ``reset`` would be made with older weights than its label says."""
    policy = Pusher()
    with collecting(ENVS, policy, frames_per_batch=4, max_in_flight=1) as collector:
        collector.update_policy_weights_(module(3.0))
        collector.update_policy_weights_(module(4.0))  # before any process runs
        assert pushes(take(collector, 1)[0]) == {2: {4.0}}
        collector.update_policy_weights_(module(6.0))
        collector.reset()
        assert pushes(take(collector, 1)[0]) == {3: {6.0}}
        collector.shutdown()
        collector.update_policy_weights_()
        assert pushes(take(collector, 1)[0]) == {4: {0.0}}


def test_a_policy_without_weights_has_version_0_for_ever() -> None:
    """Updates of nothing must not make what it collects look too old."""
    with collecting(ENVS, None, frames_per_batch=4, max_in_flight=1) as collector:
        for _ in range(3):
            collector.update_policy_weights_()
        for batch in take(collector, 3):
            assert pushes(batch).keys() == {0}
            collector.update_policy_weights_()
