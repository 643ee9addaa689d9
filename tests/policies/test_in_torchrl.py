"""A policy and its envs in TorchRL code that knows nothing of this library."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.utils import ExplorationType

from vla_async import keys
from vla_async.envs import ToyEnvs
from vla_async.policies import TinyVLAPolicy


def one() -> EnvBase:
    return ToyEnvs(chunk_size=4).make(0)


def batched() -> EnvBase:
    return ToyEnvs(chunk_size=4, batched=True, num_envs=3).make(0)


def serial() -> EnvBase:
    return SerialEnv(2, one)


@pytest.mark.parametrize("make", [one, batched, serial])
def test_a_torchrl_collector_takes_env_and_policy_as_they_are(make: object) -> None:
    """If this failed, nobody could use the envs or the policy alone."""
    env = make()  # type: ignore[operator]
    policy = TinyVLAPolicy()
    policy.build(one().env_spec)  # type: ignore[attr-defined]
    collector = Collector(env, policy, frames_per_batch=24, total_frames=48, exploration_type=ExplorationType.RANDOM)
    batches = list(collector)
    collector.shutdown()
    assert [batch.numel() for batch in batches] == [24, 24]
    for batch in batches:
        assert batch[keys.CHUNK].shape == (*batch.batch_size, 4, 2)
        assert batch[keys.LOG_PROB].isfinite().all()
        assert batch[keys.CHUNK].flatten(-2).std(-1).gt(0).all()  # it really sampled


def test_a_new_instruction_replaces_the_tokens_of_the_old_one() -> None:
    """A collector carries unknown keys over to the next episode; stale tokens would be those of another task."""
    policy = TinyVLAPolicy()
    policy.build(one().env_spec)  # type: ignore[attr-defined]
    state = {"observation": TensorDict({"state": torch.zeros(4)})}
    td = TensorDict(state | {keys.INSTRUCTION: "push the cube"})
    policy(td)
    policy(td.set(keys.INSTRUCTION, "pick the bowl"))
    assert torch.equal(td[keys.INSTRUCTION_TOKENS], policy.tokenize("pick the bowl"))
