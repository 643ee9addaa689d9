"""The emulated policy and its device: what it gives, what it costs, and that its copies take turns everywhere."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from vla_async import keys
from vla_async.emulation import DeviceLock, EmulatedEnvBase, EmulatedEnvs, EmulatedPolicy

Interval = tuple[float, float]


def hold_often(lock: DeviceLock, times: int = 20) -> list[Interval]:
    """Hold the device several times; returns from when to when, on a clock that all processes share."""
    held = []
    for _ in range(times):
        with lock:
            begin = time.monotonic()
            time.sleep(0.001)
            held.append((begin, time.monotonic()))
    return held


def hold_in_child(packed: bytes, connection: Any) -> None:
    connection.send("ready")
    connection.recv()
    connection.send(hold_often(pickle.loads(packed)))


def hold_inherited(lock: DeviceLock, connection: Any) -> None:
    connection.send("ready")
    connection.recv()
    connection.send(hold_often(lock))


def assert_disjoint(held: list[Interval]) -> None:
    ordered = sorted(held)
    assert len(ordered) > 20
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(ordered))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_take_turns_on_the_device(method: str) -> None:
    """Otherwise policies in many workers would have a device each, and beat any engine with one."""
    lock = DeviceLock()
    with lock:  # opened before the child is made, which a forked child must not reuse
        pass
    context: Any = multiprocessing.get_context(method)
    connections, processes = [], []
    for target, argument in ((hold_in_child, cloudpickle.dumps(lock)), (hold_inherited, lock)):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(argument, theirs))
        process.start()
        connections.append(ours)
        processes.append(process)
    assert [connection.recv() for connection in connections] == ["ready"] * 2
    for connection in connections:
        connection.send("go")
    held = hold_often(lock)
    for connection in connections:
        held += connection.recv()
    for process in processes:
        process.join()
    assert_disjoint(held)


@pytest.mark.parametrize("other", [lambda lock: lock, copy.deepcopy])
def test_threads_take_turns_on_the_device(other: Callable[[DeviceLock], DeviceLock]) -> None:
    lock = DeviceLock()
    held: list[Interval] = []
    threads = [threading.Thread(target=lambda it=it: held.extend(hold_often(it))) for it in (lock, other(lock))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_disjoint(held)


def test_an_error_while_the_device_is_held_sets_it_free() -> None:
    lock = DeviceLock()
    with pytest.raises(ArithmeticError), lock:
        raise ArithmeticError
    with copy.deepcopy(lock):
        pass


def test_two_policies_have_two_devices_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.touch()
    own, same = DeviceLock(), DeviceLock(path)
    assert own.path != same.path == DeviceLock(path).path
    with own, same:
        pass


def test_a_forward_holds_the_device_and_costs_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = EmulatedPolicy((2, 7), flat_s=1.0, per_row_s=0.25)
    slept: list[tuple[float, bool]] = []

    def sleep(seconds: float) -> None:
        attempt = threading.Thread(target=lambda: copy.deepcopy(policy._device).__enter__(), daemon=True)
        attempt.start()
        attempt.join(0.05)
        slept.append((seconds, attempt.is_alive()))

    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", sleep)
    policy(TensorDict({"observation": TensorDict({"state": torch.zeros(4, 8)}, [4])}, [4]))
    monkeypatch.undo()
    assert slept == [(2.0, True)]


def test_a_policy_without_cost_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLock, "__enter__", lambda self: pytest.fail("it asked for one"))
    EmulatedPolicy((1, 2), observation_key="observation", action_key="action")(TensorDict({"observation": torch.zeros(3)}))


def test_an_action_depends_on_its_own_row_alone() -> None:
    """A batch in another order, or of another size, must give each env the same action, bit for bit."""
    policy = EmulatedPolicy((3, 2))
    state = torch.arange(40.0).reshape(5, 8)
    together = policy(TensorDict({keys.STATE: state}, [5]))[keys.CHUNK]
    assert together.shape == (5, 3, 2)
    for row in range(5):
        assert torch.equal(policy(TensorDict({keys.STATE: state[row]}))[keys.CHUNK], together[row])
    assert together.unique(dim=0).shape[0] == 5


@pytest.mark.parametrize("transfer", [copy.deepcopy, lambda it: pickle.loads(cloudpickle.dumps(it))])
def test_a_copy_has_the_same_device_weights_and_keys(transfer: Callable[[EmulatedPolicy], EmulatedPolicy]) -> None:
    policy = EmulatedPolicy((1, 2), flat_s=0.001, payload_mb=0.5)
    copied = transfer(policy)
    assert isinstance(copied._device, DeviceLock)
    assert isinstance(policy._device, DeviceLock)
    assert copied._device.path == policy._device.path
    assert (copied.in_keys, copied.out_keys) == ([keys.STATE], [keys.CHUNK])
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), copied.parameters(), strict=True))


def test_the_payload_has_its_size() -> None:
    policy = EmulatedPolicy((1, 2), payload_mb=2.0)
    assert sum(p.numel() * p.element_size() for p in policy.parameters()) == 2_000_000 + 2 * 2 * 4


def test_it_drives_both_kinds_of_env() -> None:
    factory = EmulatedEnvs(chunk_size=2, max_episode_steps=6)
    assert factory.make(0).rollout(3, EmulatedPolicy((2, 7))).shape == (3,)
    plain = EmulatedPolicy((7,), observation_key="observation", action_key="action")
    assert EmulatedEnvBase(factory.make_simulator(0)).rollout(3, plain)["action"].shape == (3, 7)


@pytest.mark.parametrize("options", [{"flat_s": -1.0}, {"per_row_s": float("nan")}, {"payload_mb": -2.0}])
def test_costs_that_cannot_be_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"EmulatedPolicy.{next(iter(options))}="):
        EmulatedPolicy((1, 2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0, 7)])
def test_an_empty_action_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="action_shape"):
        EmulatedPolicy(shape)
