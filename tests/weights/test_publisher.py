"""Weights reach a replica whole, under the right number, and provably so. One process: publisher and receiver in turns."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from vla_async.weights.publisher import WeightPublisher, WeightReceiver, checksum, plain_weights, published_names


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank addition, and a buffer, as peft makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x - self.mean) + self.up(self.down(x))
        return y


class Rig:
    """A publisher, and replicas that answer as soon as they are told to look."""

    def __init__(self, policy: nn.Module, replicas: list[nn.Module], *, copy: bool = False, version: int = 0) -> None:
        self.acks: deque[tuple[int, int, int]] = deque()
        self.publisher = WeightPublisher(policy, len(replicas), version, self.announce, self.await_acks)
        self.receivers = [WeightReceiver(replica, self.publisher.shared, copy) for replica in replicas]
        self.damage = False
        self.answer()

    def announce(self) -> None:
        for receiver in self.receivers:
            receiver.update()
        self.answer()

    def answer(self) -> None:
        for number, receiver in enumerate(self.receivers):
            if self.damage:
                next(iter(receiver._targets.values())).data.view(-1)[0] += 1.0
            self.acks.append((number, receiver.version, receiver.checksum()))

    def await_acks(self) -> list[tuple[int, int, int]]:
        assert self.acks, "a publisher would wait for ever"
        return [self.acks.popleft()]


def change(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def twins(number: int) -> tuple[LowRank, list[nn.Module]]:
    policy = LowRank()
    replicas: list[nn.Module] = []
    for _ in range(number):
        replica = LowRank()
        replica.load_state_dict(policy.state_dict())
        replicas.append(replica)
    return policy, replicas


@pytest.mark.parametrize("copy", [False, True], ids=["pointed", "copied"])
def test_every_replica_decides_as_the_trainer_does_after_each_publish(copy: bool) -> None:
    """Three publishes use both copies in shared memory, and the first again."""
    policy, replicas = twins(2)
    rig, x = Rig(policy, replicas, copy=copy), torch.randn(5, 4)
    for version in (1, 2, 3):
        change(policy)
        policy.mean += 1.0
        rig.publisher.publish(version)
        rig.publisher.confirm()
        for replica, receiver in zip(replicas, rig.receivers, strict=True):
            assert torch.equal(replica(x), policy(x)), "the replica decides with other weights"
            assert receiver.version == version


def test_what_the_trainer_does_after_a_publish_stays_with_the_trainer() -> None:
    """Replicas that shared the trainer's memory would act on weights of no version at all."""
    policy, [replica] = twins(1)
    rig, x = Rig(policy, [replica]), torch.randn(5, 4)
    rig.publisher.publish(1)
    before = replica(x)
    change(policy)
    assert torch.equal(replica(x), before)
    assert not torch.equal(policy(x), before)


def test_only_what_is_trained_and_the_buffers_are_sent() -> None:
    """Of a large model with adapters, the frozen part is not sent with every update."""
    policy, _ = twins(0)
    assert published_names(policy) == ["down.weight", "mean", "up.weight"]
    policy.requires_grad_(False)
    assert "base.weight" in published_names(policy), "a policy of which nothing is trained is sent whole"


def test_a_frozen_tensor_that_changed_is_refused() -> None:
    """The replicas would go on with the old one, unnoticed."""
    policy, replicas = twins(1)
    rig = Rig(policy, replicas)
    with torch.no_grad():
        policy.base.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"base\.weight is frozen"):
        rig.publisher.publish(1)


def test_a_replica_that_holds_something_else_is_found_out() -> None:
    policy, replicas = twins(1)
    rig = Rig(policy, replicas)
    rig.damage = True
    rig.publisher.publish(1)
    with pytest.raises(RuntimeError, match="replica 0 holds weights of version 1 that are not those published"):
        rig.publisher.confirm()


def test_a_replica_that_started_with_other_weights_is_found_out() -> None:
    policy, replicas = twins(1)
    change(policy)
    with pytest.raises(RuntimeError, match="version 0"):
        Rig(policy, replicas).publisher.confirm()


def test_a_resumed_run_starts_with_its_own_version() -> None:
    policy, replicas = twins(1)
    rig = Rig(policy, replicas, version=7)
    rig.publisher.confirm()
    assert rig.receivers[0].version == 7
    with pytest.raises(ValueError, match="version=7 is not larger"):
        rig.publisher.publish(7)


def test_weights_are_taken_in_every_form() -> None:
    policy, replicas = twins(1)
    rig, x = Rig(policy, replicas), torch.randn(5, 4)
    other = LowRank()
    other.base.load_state_dict(policy.base.state_dict())
    forms = [lambda: other, lambda: TensorDict.from_module(other).data, other.state_dict]
    for version, form in enumerate(forms, start=1):
        change(other)
        rig.publisher.publish(version, form())
        rig.publisher.confirm()
        assert torch.equal(replicas[0](x), other(x))


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    policy, replicas = twins(1)
    rig = Rig(policy, replicas)
    with pytest.raises(ValueError, match=r"lack \['down.weight'"):
        rig.publisher.publish(1, {"base.weight": torch.zeros(3, 4)})
    state = dict(policy.state_dict())
    with pytest.raises(ValueError, match=r"up\.weight has shape \[3, 3\]"):
        rig.publisher.publish(1, state | {"up.weight": torch.zeros(3, 3)})
    with pytest.raises(TypeError, match="list"):
        plain_weights([1])
    assert rig.publisher.version == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_checksum_sees_a_single_changed_element(dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(3, 5, dtype=dtype), "b": torch.zeros(2, dtype=dtype), "c": torch.zeros(0, dtype=dtype)}
    before = checksum(tensors)
    assert checksum(dict(reversed(tensors.items()))) == before
    tensors["a"][1, 2] = 0
    assert checksum(tensors) != before
    swapped = {"a": tensors["b"], "b": tensors["a"], "c": tensors["c"]}
    assert checksum(swapped) != checksum(tensors), "two tensors that changed places are noticed"
