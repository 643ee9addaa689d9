"""Where the time goes: every second of a role is counted once, and whoever is waited for is named."""

from __future__ import annotations

from typing import Any

import pytest

from vla_async.monitor.time_use import time_use
from vla_async.monitor.timeline import Slice


def piece(lane: str, name: str, start_s: float, end_s: float, **args: Any) -> Slice:
    return Slice(lane, name, start_s, end_s, None, args)


def run(worker: list[Slice], replica: list[Slice], trainer: list[Slice]) -> list[Slice]:
    """Two steps of five seconds, from 10 s on, and what is given of each role."""
    steps = [piece("trainer rank 0", f"step {n}", 5.0 + 5 * n, 10.0 + 5 * n, step=n) for n in (1, 2)]
    everything = sorted([*steps, *trainer], key=lambda slice: (slice.start_s, -slice.end_s))
    return [*everything, *replica, *worker]


STEPS = piece("env worker 0", "env steps", 8.0, 14.0)
RESET = piece("env worker 0", "reset", 13.0, 14.0)
NO_SLOT = piece("env worker 0", "wait for a slot", 14.0, 15.0)
FORWARD = piece("replica 0", "forward", 10.0, 11.0, rows=4)
WAIT = piece("trainer rank 0", "wait for trajectories", 10.0, 13.0)
LOG = piece("trainer rank 0", "log and callbacks", 17.0, 20.0)
VALIDATE = piece("trainer rank 0", "validate", 17.0, 19.0)


def test_every_second_is_counted_once_and_only_those_of_the_steps() -> None:
    """A reset is inside the decision that ended the episode; what began before the first step counts from there on."""
    use = time_use(run([STEPS, RESET, NO_SLOT], [FORWARD], [WAIT, LOG, VALIDATE]), 1, 2)
    assert (use.steps, use.seconds, use.mean_batch) == (2, 10.0, 4.0)
    shares = {name: role.shares for name, role in use.roles.items()}
    assert shares["env workers"] == pytest.approx(
        {"stepping": 0.3, "resetting": 0.1, "waiting for slots": 0.1, "waiting for decisions": 0.5}
    )
    assert shares["replicas"] == pytest.approx({"deciding": 0.1, "idle": 0.9})
    trainer = {"waiting for trajectories": 0.3, "validating": 0.2, "log and callbacks": 0.1, "rest": 0.4}
    assert shares["trainer"] == pytest.approx(trainer)


def test_processes_of_a_role_are_averaged() -> None:
    workers = [STEPS, *(piece(f"env worker {n}", "env steps", 15.0, 20.0) for n in (1, 2))]
    role = time_use(run(workers, [FORWARD], [WAIT]), 1, 2).roles["env workers"]
    assert role.processes == 3
    assert role.shares == pytest.approx({"stepping": (4 + 5 + 5) / 30, "waiting for decisions": 1.0 - 14 / 30})


BUSY_REPLICA = piece("replica 0", "forward", 10.0, 19.0, rows=1)
BUSY_ENV = piece("env worker 0", "env steps", 10.0, 19.0)
FED = piece("trainer rank 0", "wait for trajectories", 10.0, 10.5)
CASES = {
    "The envs are the bottleneck: the trainer waits for trajectories 30% of its time": ([BUSY_ENV], [FORWARD], [WAIT]),
    "The replicas are the bottleneck: the trainer waits for trajectories 30%": ([STEPS], [BUSY_REPLICA], [WAIT]),
    "The trainer is the bottleneck: it waits for trajectories 5% of its time, and env workers wait for free slots 10%": (
        [STEPS, NO_SLOT],
        [FORWARD],
        [FED],
    ),
    "Rollouts and training take turns: of an update, the envs take 40%, decisions 0% and training 0%.": (
        [],
        [],
        [piece("trainer rank 0", "wait for envs", 10.0, 14.0)],
    ),
}


@pytest.mark.parametrize("sentence", CASES)
def test_who_is_waited_for_is_named(sentence: str) -> None:
    assert time_use(run(*CASES[sentence]), 1, 2).bottleneck.startswith(sentence)


def test_steps_that_were_not_recorded_are_named() -> None:
    with pytest.raises(ValueError, match=r"the timeline has no step 3; it has \[1, 2\]"):
        time_use(run([STEPS], [FORWARD], []), 2, 3)
