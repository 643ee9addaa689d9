"""A streaming fit whose workers or replicas break: it goes on and tells, or ends with an error and a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.collectors.rollout_fakes import OnceFaulty
from tests.fakes import ClockEnvs, KnownPolicy
from tests.loops.streaming_fakes import balance, fit, known
from vla_async.callbacks import Callback
from vla_async.collectors.pool import WorkerError
from vla_async.objectives import PPO
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer


class Kills(Callback):
    """Kills a process of the rollout after a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.step:
            fleet: Any = trainer.fit_loop._fleet
            members = fleet._workers if self.what == "worker" else fleet._replicas
            os.kill(members[0].process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_interaction": False}, {"train_async": False, "streamer": False}, {"envs_per_worker": 2}],
    ids=str,
)
def test_a_killed_worker_is_replaced_while_training_goes_on_and_is_counted(settings: dict[str, Any], tmp_path: Path) -> None:
    _, steps = fit(tmp_path, known(PPO()), ClockEnvs(num_envs=2), Kills("worker", 2), max_steps=40, **settings)
    assert len(steps) == 40
    assert steps[40]["worker/restarts"] == 1.0
    assert all(balance(metrics) for metrics in steps.values())
    assert max(metrics["staleness/max"] for metrics in steps.values()) <= 1.0


def test_an_env_that_breaks_again_and_again_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    envs = ClockEnvs(num_envs=2, fault="raise-in-step", fault_env=1, fault_step=20)
    with pytest.raises(WorkerError, match=r"(?s)the clock of env 1 broke in step.*after 1 restarts; max_restarts"):
        fit(tmp_path, known(PPO()), envs, max_steps=-1, max_restarts=1)
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] >= 1


def test_an_env_that_breaks_once_costs_one_fragment(tmp_path: Path) -> None:
    envs = OnceFaulty(num_envs=2, fault="raise-in-step", fault_env=1, fault_step=8, flag=str(tmp_path / "fault"))
    _, steps = fit(tmp_path, known(PPO()), envs, max_steps=30)
    assert steps[30]["worker/restarts"] == 1.0
    assert steps[30]["queue/dropped/worker ended"] == 1.0


def test_a_replica_that_dies_ends_the_run_with_an_error_and_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"replica 0 \(pid \d+\) was killed by SIGKILL"):
        fit(tmp_path, known(PPO()), ClockEnvs(), Kills("replica", 3), max_steps=-1)
    [last] = tmp_path.glob("test/*/checkpoints/last.ckpt")
    assert read_checkpoint(last)["counters"]["step"] >= 3


def test_a_policy_that_computes_nonsense_in_the_rollout_ends_the_run_and_says_where(tmp_path: Path) -> None:
    policy = KnownPolicy(nan_at=4)
    policy.objective = PPO()
    with pytest.raises(WorkerError, match=r"(?s)vla_action.chunk is not finite.*for env \[\d"):
        fit(tmp_path, policy, ClockEnvs(), max_steps=-1)
