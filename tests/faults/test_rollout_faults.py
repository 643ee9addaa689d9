"""Envs that raise, die or hang in a rollout are replaced, with everything accounted for; what cannot be helped ends it."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase

from tests.collectors.rollout_fakes import (
    BlindAtTheEnd,
    CounterEnv,
    OnceFaulty,
    Pusher,
    Troubled,
    all_slots_wait,
    collecting,
    episodes,
    take,
)
from tests.fakes import ClockEnvs, KnownPolicy, Stillborn, is_running, wait_until
from vla_async import keys
from vla_async.collectors import StreamingCollector
from vla_async.collectors.board import SlotState
from vla_async.collectors.pool import WorkerError
from vla_async.weights.publisher import WeightPublisher

COUNTERS = [partial(CounterEnv, number) for number in range(2)]


def take_until_replaced(collector: StreamingCollector, restarts: int = 1) -> list[TensorDictBase]:
    """Batches until so many workers were replaced, and some from the new ones."""
    batches: list[TensorDictBase] = []
    fresh = 0
    for batch in collector:
        batches.append(batch)
        started = all(worker.started is None for worker in collector.fleet._workers)
        fresh += collector.stats()["restarts"] == restarts and started
        if fresh > 5:
            return batches
        time.sleep(0.03)
    raise AssertionError("it ended")


def check_clocks(batches: list[TensorDictBase], num_envs: int = 2) -> None:
    """Every trajectory is one episode without a hole, and no episode comes twice."""
    found = episodes(batches)
    for number, episode in found.items():
        begun, steps = episode[keys.STATE][:, 1], episode[keys.EXECUTED].sum(-1)
        assert torch.equal(begun - begun[0], torch.cumsum(steps, 0) - steps), f"trajectory {number} has a hole"
        assert len(episode["collector", "seed"].unique()) == 1
    seeds = [int(episode["collector", "seed"][0]) for episode in found.values()]
    assert len(set(seeds)) == len(seeds)
    assert {number % num_envs for number in episodes(batches[-6:])} == set(range(num_envs)), "an env is missing at the end"


@pytest.mark.parametrize("fault", ["raise-in-step", "die-in-step", "hang-in-step", "raise-in-reset", "hang-in-reset"])
def test_an_env_that_breaks_is_replaced_and_the_others_go_on(fault: str, tmp_path: Path) -> None:
    envs = OnceFaulty(fault=fault, fault_env=1, fault_step=8, flag=str(tmp_path / "fault"))
    timeout = 1.5 if fault.startswith("hang") else 60.0
    with collecting(envs, KnownPolicy(), frames_per_batch=12, env_timeout_s=timeout) as collector:
        batches = take_until_replaced(collector)
        wait_until(lambda: all_slots_wait(collector), "no slot is lost")
        stats = collector.stats()
    check_clocks(batches)
    first = torch.cat([part for part in episodes(batches).values() if int(part["collector", "traj_ids"][0]) % 2 == 0])
    assert sorted(first["collector", "traj_ids"].unique().tolist()) == list(range(0, 2 * len(first) // 3, 2)), (
        "the env that is well lost an episode"
    )
    assert stats["restarts"] == 1
    assert stats["queue/dropped/worker ended"] == 1, "the unfinished trajectory is dropped and counted"


@pytest.mark.parametrize(
    "options",
    [
        {"envs_per_worker": 3},
        {"async_interaction": False},
        {"policy_devices": ["cpu", "cpu"]},
        {"max_in_flight": 1},
    ],
    ids=str,
)
def test_a_killed_worker_is_replaced_however_the_envs_are_placed(options: dict[str, object]) -> None:
    """Two of them at the same time, if there are two."""
    with collecting(ClockEnvs(num_envs=3), KnownPolicy(), frames_per_batch=18, **options) as collector:
        before = take(collector, 2)
        victims = [worker.process.pid for worker in collector.fleet._workers[:2]]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        batches = take_until_replaced(collector, len(victims))
        if options != {"async_interaction": False}:  # there, an env that has no slot holds up the others
            wait_until(lambda: all_slots_wait(collector), "no slot is lost")
    check_clocks([*before, *batches], num_envs=3)


def test_workers_that_die_while_they_take_slots_are_not_waited_for() -> None:
    """Both died between two instructions, and whoever looks after the first must not wait for the second."""
    with collecting(ClockEnvs(), KnownPolicy(), frames_per_batch=12) as collector:
        take(collector, 1)
        wait_until(lambda: all_slots_wait(collector), "the envs wait for slots")
        victims = [worker.process.pid for worker in collector.fleet._workers]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        collector.fleet.board.claiming[:] = 1
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        check_clocks(take_until_replaced(collector, 2))


def test_a_new_worker_waits_until_the_replica_has_given_back_the_old_ones_slots(tmp_path: Path) -> None:
    """The replica is in a long forward pass; what it finds when it looks up must still be the old worker's."""
    gate = tmp_path / "gate"
    with collecting(COUNTERS, Troubled(gate=gate), frames_per_batch=8) as collector:
        take(collector, 1)
        fleet = collector.fleet
        gate.touch()
        wait_until(lambda: bool((fleet.board.state == SlotState.ACTING).sum() == 2), "both envs want a decision")
        os.kill(fleet._workers[1].process.pid, signal.SIGKILL)
        wait_until(lambda: collector.stats()["restarts"] == 1 and fleet._workers[1].started is None, "another is there")
        time.sleep(0.2)
        gate.unlink()
        batches = take(collector, 12)
        wait_until(lambda: all_slots_wait(collector), "no slot is lost")
        assert collector.stats()["queue/dropped/worker ended"] == 1
    for batch in batches:
        for row in batch["observation"]:
            assert len(row[:, 0].unique()) == 1, "two envs wrote to one slot"
    assert {int(number) for batch in batches[-4:] for number in batch["observation"][..., 0].unique()} == {0, 1}


def test_a_worker_that_dies_before_it_leaves_a_finished_slot_takes_it_from_nobody(tmp_path: Path) -> None:
    """It had told of the slot, which was consumed and is another env's by now: two would write to it.

    Two slots for two envs: one env waits for the other's, and dies with the number of that slot still on the board.
    """
    gate = tmp_path / "gate"
    with collecting(COUNTERS, Troubled(gate=gate), frames_per_batch=4, fragment_length=4) as collector:
        take(collector, 1)
        board = collector.fleet.board
        wait_until(lambda: all_slots_wait(collector), "the envs wait for slots")
        gate.touch()
        take(collector, 1)
        wait_until(lambda: bool((board.state == SlotState.ACTING).any()), "one of them has a slot")
        victim = int((board.slot < 0).argmax())
        board.slot[victim] = board.slot.max()
        os.kill(collector.fleet._workers[victim].process.pid, signal.SIGKILL)
        wait_until(lambda: collector.stats()["restarts"] == 1, "it is replaced")
        gate.unlink()
        batches = take(collector, 12)
        assert collector.stats()["queue/dropped/worker ended"] == 0
        wait_until(lambda: all_slots_wait(collector), "no slot is lost")
    for batch in batches:
        assert len(batch["observation"][..., 0].unique()) == 1, "two envs wrote to one slot"


def test_a_storm_of_kills_loses_no_slot() -> None:
    """Workers die at any moment, also while they take slots and hand them over."""
    chance = random.Random(0)
    with collecting(ClockEnvs(num_envs=3), KnownPolicy(), frames_per_batch=9, max_restarts=20) as collector:
        batches, killed = [], set[int]()
        for batch in collector:
            batches.append(batch)
            alive = [worker.process.pid for worker in collector.fleet._workers if worker.started is None]
            if len(batches) % 7 == 0 and len(killed) < 8 and (alive := sorted(set(alive) - killed)):
                killed.add(chance.choice(alive))
                os.kill(max(killed, key=lambda pid: pid in alive), signal.SIGKILL)
            if collector.stats()["restarts"] >= 8:
                break
            time.sleep(0.005 * chance.random())
        batches += take_until_replaced(collector, collector.stats()["restarts"])
        wait_until(lambda: all_slots_wait(collector), "no slot is lost")
        counts = {name: value for name, value in collector.stats().items() if name.startswith("queue/")}
    check_clocks(batches, num_envs=3)
    assert counts["queue/produced"] == sum(value for name, value in counts.items() if name in PARTS)


PARTS = ("queue/consumed", "queue/in_flight", "queue/dropped/worker ended", "queue/dropped/stale")


def test_too_many_restarts_end_the_run_with_the_workers_own_traceback() -> None:
    envs = ClockEnvs(fault="raise-in-step", fault_env=1, fault_step=3)
    with collecting(envs, KnownPolicy(), frames_per_batch=12, max_restarts=1) as collector:
        with pytest.raises(WorkerError, match="ArithmeticError: the clock of env 1 broke in step") as failure:
            take(collector, 1000)
        assert collector.closed, "an error leaves no process behind"
    assert "env worker 1 failed" in str(failure.value)
    assert "after 1 restarts; max_restarts" in str(failure.value)


@pytest.mark.parametrize(("fault", "word"), [("die-in-step", "SIGKILL"), ("hang-in-step", "env_timeout_s")])
def test_without_restarts_the_first_fault_ends_the_run_and_says_why(fault: str, word: str) -> None:
    envs = ClockEnvs(fault=fault, fault_env=1, fault_step=3)
    options = {"frames_per_batch": 12, "max_restarts": 0, "env_timeout_s": 1.5}
    with collecting(envs, KnownPolicy(), **options) as collector, pytest.raises(WorkerError, match=word):
        take(collector, 1000)


@pytest.mark.parametrize(
    ("envs", "what"),
    [
        (ClockEnvs(fault="raise-in-build", fault_env=1), "the clock of env 1 broke in build"),
        (ClockEnvs(fault="die-in-build", fault_env=1), "env worker 1 .*SIGKILL"),
        (ClockEnvs(fault="hang-in-build", fault_env=1), "start_timeout_s=3 s from env worker 1"),
        (ClockEnvs(odd_env=1), "env worker 1 gives"),
        (Stillborn(), "a script without a main guard"),
        ([lambda: 3], "must return a TorchRL EnvBase"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_envs_that_cannot_be_built_end_the_run_at_once(envs: object, what: str) -> None:
    with collecting(envs, KnownPolicy(), frames_per_batch=12, start_timeout_s=3.0) as collector:
        with pytest.raises(WorkerError, match=what):
            take(collector, 1)
        assert collector.closed


def test_a_policy_that_raises_ends_the_run_and_names_its_input() -> None:
    what = r"input was observation float32 \[\d, 3\] in \[0, 2\]"
    with (
        collecting(COUNTERS, Troubled("raise", at=2), frames_per_batch=8) as collector,
        pytest.raises(WorkerError, match=what) as failure,
    ):
        take(collector, 10)
    assert "the policy lost its mind" in str(failure.value)


def test_a_nan_ends_the_run_and_names_its_input() -> None:
    """In what the policy writes for one row of a batch, without a dimension of its own."""
    what = "the policy's log_prob is not finite; it was for env"
    with (
        collecting(COUNTERS, Troubled("nan", at=3), frames_per_batch=8) as collector,
        pytest.raises(WorkerError, match=what) as failure,
    ):
        take(collector, 10)
    assert re.search(r"observation float32 \[\d, 3\] in \[0, 3\]", str(failure.value))


def test_a_nan_in_the_value_of_an_end_ends_the_run_too() -> None:
    """Nobody decides there, but the advantages of a whole episode would come from it."""
    what = "the policy's state_value is not finite"
    with (
        collecting(ClockEnvs(), BlindAtTheEnd(), frames_per_batch=12) as collector,
        pytest.raises(WorkerError, match=what),
    ):
        take(collector, 10)


def publish_twice(publisher: WeightPublisher) -> None:
    """The second waits until the replicas hold the first."""
    publisher.publish(publisher.version + 1)
    publisher.publish(publisher.version + 1)


def test_a_replica_that_dies_ends_the_run_for_everyone_who_comes() -> None:
    """Whoever waits is woken, and whoever comes later does not begin to wait."""
    with collecting(COUNTERS, Pusher(), frames_per_batch=8) as collector:
        take(collector, 1)
        fleet = collector.fleet
        os.kill(fleet._replicas[0].process.pid, signal.SIGKILL)
        iterators = [collector.iterator() for _ in range(2)]
        for iterator in iterators:
            with pytest.raises(WorkerError, match=r"replica 0 \(pid \d+\).*SIGKILL"):
                list(iterator)
        for _ in range(2):
            with pytest.raises(WorkerError, match="replica 0"):
                publish_twice(fleet.publisher)
        with pytest.raises(WorkerError, match="replica 0"), collector.pause():
            pass


def test_an_interrupt_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with collecting(COUNTERS, Troubled(), frames_per_batch=8) as collector:
        take(collector, 1)
        pids = [worker.process.pid for worker in collector.fleet._workers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            take(collector, 100)
        timer.join()
        collector.shutdown(timeout=0.2)
    assert not any(map(is_running, pids))
