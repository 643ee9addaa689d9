"""How far the envs run ahead of the consumer: never too far, with nothing lost, and together where they should."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDictBase

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, episodes, take
from tests.fakes import ClockEnvs, KnownPolicy, equal, wait_until
from vla_async import keys
from vla_async.collectors import StreamingCollector


def envs_of(*delays: float, horizon: int = 5) -> list[partial[CounterEnv]]:
    return [partial(CounterEnv, number, horizon=horizon, delay_s=delay) for number, delay in enumerate(delays)]


def is_idle(collector: StreamingCollector) -> bool:
    """Whether all envs wait for slots, since the consumer has not taken any for long."""
    return bool((collector.fleet.board.slot == -1).all())


def steps_of(batches: list[TensorDictBase]) -> dict[int, list[tuple[int, int]]]:
    """(episode, step) of each decision, by env, in the order in which they came."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in batches:
        for row in batch:
            number, *_ = row["observation"][:, 0].unique().tolist()
            found.setdefault(int(number), []).extend((int(e), int(c)) for e, c in row["observation"][:, 1:].tolist())
    return found


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_slow_consumer_loses_nothing_and_gets_nothing_too_old(max_in_flight: int) -> None:
    """Envs of which one takes twenty times as long; the consumer sometimes waits until all of them wait for it."""
    policy = Pusher()
    envs = envs_of(0.0, 0.002, 0.02)
    with collecting(envs, policy, frames_per_batch=12, max_in_flight=max_in_flight) as collector:
        batches = []
        for number, batch in enumerate(collector):
            batches.append(batch)
            age = collector.policy_version - batch[keys.POLICY_VERSION]
            assert int(age.min()) >= 0
            assert int(age.max()) <= max_in_flight - 1
            if number == 14:
                break
            if number % 5 == 0:
                wait_until(lambda: is_idle(collector), "the envs have filled their slots")
            with torch.no_grad():
                policy.push.add_(1.0)
            collector.update_policy_weights_()
        stats = collector.stats()
    assert stats["restarts"] == 0
    dropped = [number for name, number in stats.items() if name.startswith("queue/dropped")]
    assert not any(dropped), "an env step was thrown away"
    steps = steps_of(batches)
    for number, seen in steps.items():
        places = [5 * episode + step for episode, step in seen]
        assert places == list(range(places[0], places[0] + len(places))), f"env {number} lost or repeated a step"
    if max_in_flight > 1:
        assert len(steps[0]) > len(steps[2]), "a fast env waits for a slow one"


def test_a_jump_of_the_version_drops_what_it_made_too_old_and_goes_on() -> None:
    """As when the learner updates several times per batch: everything under way is older than η, and replaced."""
    with collecting(envs_of(0.0, 0.0), Pusher(), frames_per_batch=8, max_in_flight=2) as collector:
        for number, batch in enumerate(collector):
            assert int((collector.policy_version - batch[keys.POLICY_VERSION]).max()) <= 1
            if number == 5:
                break
            wait_until(lambda: is_idle(collector), "the envs have filled their slots")
            for _ in range(4):
                collector.update_policy_weights_()
        counts = {name: value for name, value in collector.stats().items() if name.startswith("queue/")}
    assert counts["queue/dropped/stale"] > 0
    assert counts["queue/produced"] == sum(value for name, value in counts.items() if name != "queue/produced")


@pytest.mark.parametrize(("max_batch_size", "sizes"), [(None, {4}), (3, {3, 1})])
def test_in_lockstep_all_envs_of_a_replica_decide_together(max_batch_size: int | None, sizes: set[int]) -> None:
    """Bmax cuts what the device takes at once; that changes no number."""
    options = {"async_interaction": False, "max_batch_size": max_batch_size, "frames_per_batch": 24}
    with collecting(ClockEnvs(num_envs=4), KnownPolicy(), **options) as collector:
        batches = take(collector, 3)
        histogram = collector.stats()["batch_size/histogram"]
    decided = {size for size, count in enumerate(histogram) if count and size > 0}
    assert sizes <= decided <= sizes | {1, 2}, "the ends of fragments are valued on their own"
    assert histogram[max(sizes)] >= 18
    for batch in batches:
        assert sorted((batch["collector", "traj_ids"][:, 0] % 4).tolist()) == [0, 1, 2, 3], "each env has one row"


def by_env(batches: list[TensorDictBase], count: int) -> dict[int, TensorDictBase]:
    """The first decisions of each env, without what tells of the engine."""
    flat = torch.cat(list(episodes(batches).values()))
    rows = flat["collector", "traj_ids"] % 3
    return {row: flat[rows == row][:count] for row in range(3)}


LAYOUTS = {
    "one replica": {},
    "two replicas": {"policy_devices": ["cpu", "cpu"]},
    "more replicas than workers": {"policy_devices": ["cpu"] * 2, "envs_per_worker": 3},
    "all on the second": {"policy_devices": ["cpu"] * 2, "assignment": [1, 1, 1]},
    "two envs in a worker": {"envs_per_worker": 2},
    "one row at a time": {"max_batch_size": 1},
    "Tmax": {"max_wait_s": 0.002},
    "padded batches": {"batch_sizes": [2, 4]},
    "lockstep": {"async_interaction": False},
}


@pytest.fixture(scope="module")
def reference() -> dict[int, TensorDictBase]:
    with collecting(ClockEnvs(num_envs=3, wordy=True), KnownPolicy(), frames_per_batch=18, seed=7) as collector:
        return by_env(take(collector, 6), 12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_seed_gives_the_same_data_whatever_the_engine_looks_like(reference: dict[int, TensorDictBase], name: str) -> None:
    """The noise belongs to the request and the episode to the env, so neither depends on who answers what together."""
    envs = ClockEnvs(num_envs=3, wordy=True)
    with collecting(envs, KnownPolicy(), frames_per_batch=18, seed=7, **LAYOUTS[name]) as collector:
        found = by_env(take(collector, 6), 12)
    for row in range(3):
        for key in (keys.STATE, keys.CHUNK, keys.VALUE, keys.REQUEST_KEY, keys.REWARD, ("collector", "seed")):
            assert equal(found[row][key], reference[row][key]), (row, key)
        assert found[row][keys.INSTRUCTION] == reference[row][keys.INSTRUCTION]


def test_every_env_decides_for_itself() -> None:
    """A fast env has had many decisions while a slow one has had few; in lockstep it would have had as many."""
    with collecting(envs_of(0.0, 0.03), Pusher(), frames_per_batch=20, fragment_length=2) as collector:
        found = Counter(int(row["observation"][0, 0]) for batch in take(collector, 3) for row in batch)
    assert found[0] > 2 * found[1]
    assert all(left < right for left, right in pairwise(sorted(found.values())))


def test_slots_that_could_all_wait_for_each_other_are_refused() -> None:
    """Rows that decide together can each lack a slot while no batch is complete: it would hang."""
    single = {"max_in_flight": 1, "fragment_length": 1}
    lockstep = {"max_in_flight": 1, "fragment_length": 2, "async_interaction": False}
    for envs, options, fix in (
        (ClockEnvs(num_envs=2), {"frames_per_batch": 6, **lockstep}, "multiple of 4"),
        (ClockEnvs(num_envs=4), {"frames_per_batch": 8, **lockstep, "policy_devices": ["cpu"] * 2}, "max_in_flight to 2"),
        (ClockEnvs(num_envs=4, batched=True), {**single, "frames_per_batch": 5}, "multiple of 4"),
        (ClockEnvs(num_envs=2), {**single, "frames_per_batch": 1}, "raise frames_per_batch"),
        (ClockEnvs(num_envs=1), {"frames_per_batch": 20_000, "fragment_length": 1}, "raise fragment_length"),
    ):
        with collecting(envs, KnownPolicy(), **options) as collector, pytest.raises(ValueError, match=fix):
            take(collector, 1)
