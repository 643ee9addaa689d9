"""Settings that cannot work are refused before any process starts, by their name, their value and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, take
from tests.fakes import ClockEnvs, KnownPolicy, tiny
from vla_async import keys
from vla_async.collectors import StreamingCollector, fleet
from vla_async.collectors.pool import WorkerError
from vla_async.envs import ToyEnvs

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("frames_per_batch=0", {"frames_per_batch": 0}),
    ("max_in_flight=0", {"max_in_flight": 0}),
    ("fragment_length=0", {"fragment_length": 0}),
    ("trajs_per_batch=0", {"trajs_per_batch": 0}),
    ("traj_format='flat'", {"trajs_per_batch": 1, "traj_format": "flat"}),
    ("envs_per_worker=0", {"envs_per_worker": 0}),
    ("num_stages=2", {"num_stages": 2}),
    ("max_batch_size=0", {"max_batch_size": 0}),
    ("max_wait_s=-1", {"max_wait_s": -1.0}),
    ("max_wait_s=nan", {"max_wait_s": float("nan")}),
    ("max_wait_s=inf", {"max_wait_s": float("inf")}),
    ("num_threads=0", {"num_threads": 0}),
    ("max_text_bytes=0", {"max_text_bytes": 0}),
    ("env_timeout_s=0", {"env_timeout_s": 0.0}),
    ("start_timeout_s=nan", {"start_timeout_s": float("nan")}),
    ("max_restarts=-1", {"max_restarts": -1}),
    ("policy_devices", {"policy_devices": []}),
    ("batch_sizes", {"batch_sizes": []}),
    ("batch_sizes", {"batch_sizes": [4, 0]}),
    ("assignment", {"assignment": [0]}),
    ("assignment", {"assignment": [0, 1]}),
    ("create_env_fn", {"create_env_fn": []}),
    ("create_env_fn", {"create_env_fn": [3]}),
]


@pytest.mark.parametrize(("what", "options"), REFUSED, ids=[what for what, _ in REFUSED])
def test_a_setting_that_cannot_work_is_refused(what: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "worker_context", lambda: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=what):
        StreamingCollector(**({"create_env_fn": ClockEnvs(), "policy": KnownPolicy(), "frames_per_batch": 8} | options))


def test_stages_must_divide_the_rows() -> None:
    with pytest.raises(ValueError, match=r"num_stages=3 must divide env\.num_envs=4"):
        StreamingCollector(ClockEnvs(num_envs=4, batched=True), KnownPolicy(), frames_per_batch=8, num_stages=3)


def test_endless_timeouts_are_legal() -> None:
    """The kernel takes no infinite wait as a number."""
    never = float("inf")
    with collecting(CounterEnv, Pusher(), frames_per_batch=8, env_timeout_s=never, start_timeout_s=1e12) as collector:
        assert len(take(collector, 2)) == 2


def test_a_policy_that_does_not_write_the_action_is_refused() -> None:
    with collecting(CounterEnv, lambda td: td, frames_per_batch=8) as collector:
        with pytest.raises(WorkerError, match=r"take the actions \[\('action',\)\], but the policy does not write them"):
            take(collector, 1)
        assert collector.closed


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2, 1), (2,)], ids=str)
def test_a_chunk_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Fewer actions would be repeated, and others left out, without a word."""
    policy = lambda td: td.set(keys.CHUNK, torch.zeros(*td.batch_size, *shape))  # noqa: E731
    envs = ClockEnvs(num_envs=1, chunk_size=2)
    with collecting(envs, policy, frames_per_batch=8) as collector, pytest.raises(WorkerError, match=r"envs take \[2, 2\]"):
        take(collector, 1)


def test_a_policy_that_reads_what_no_env_gives_is_refused() -> None:
    envs = ToyEnvs(num_envs=1, obs="state")
    with collecting(envs, tiny(use_images=True), frames_per_batch=8) as collector:
        with pytest.raises(ValueError, match="image"):
            take(collector, 1)
        assert collector.closed


def test_envs_and_policy_may_be_lambdas() -> None:
    """TorchRL's process workers refuse them, with a message that does not say so."""
    gain = 0.5
    policy = lambda td: td.set("action", gain + 0 * td["observation"][..., :1])  # noqa: E731
    with collecting([lambda: CounterEnv(7)], policy, frames_per_batch=8) as collector:
        batch = take(collector, 1)[0]
    assert batch["action"].unique().tolist() == [0.5]
    assert batch["observation"][..., 0].unique().tolist() == [7.0]


def test_what_is_not_a_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="max_wait_ms"):
        StreamingCollector(CounterEnv, Pusher(), frames_per_batch=8, max_wait_ms=3)  # type: ignore[call-arg]
