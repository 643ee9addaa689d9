"""Validation beside training when something ends that should not: the run learns of it, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ClockEnvs, KnownPolicy, is_running, make_trainer, tiny, wait_until
from tests.faults.test_ends import processes_of_session, resume, run, said, wait_for_step
from tests.faults.toy_run import BESIDE
from tests.loops.validation_fakes import At, await_evaluation, gated
from vla_async.callbacks import Callback
from vla_async.collectors.pool import WorkerError
from vla_async.envs import EnvFactory
from vla_async.loops import EvaluateLoop, SyncFitLoop
from vla_async.objectives import PPO
from vla_async.policies import VLAPolicy
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def make(root: Path, *callbacks: Callback, every: int = 1000, max_steps: int = 3) -> AsyncTrainer:
    return make_trainer(
        root,
        fit_loop=SyncFitLoop(decisions_per_env=3, update_epochs=1),
        evaluate_loop=EvaluateLoop(num_episodes=2, num_videos=0, beside_training=True),
        max_steps=max_steps,
        val_every_n_steps=every,
        callbacks=[*callbacks],
    )


def fails(
    trainer: AsyncTrainer, error: type[Exception], message: str, env: EnvFactory, policy: VLAPolicy | None = None
) -> None:
    with pytest.raises(error, match=message):
        trainer.fit(tiny() if policy is None else policy, env)


def process(trainer: AsyncTrainer) -> Any:
    return trainer.validation._process.member.process  # type: ignore[attr-defined]


def kill(trainer: AsyncTrainer) -> None:
    """End the evaluation process, and wait until it has."""
    os.kill(process(trainer).pid, signal.SIGKILL)
    wait_until(lambda: not is_running(process(trainer).pid), "the process ends")


def test_a_killed_evaluation_ends_the_run_and_leaves_what_can_be_resumed(tmp_path: Path) -> None:
    """In the middle of an episode: as the kernel does when memory runs out."""
    gate = tmp_path / "gate"
    trainer = make(tmp_path, At(2, lambda trainer: (await_evaluation(gate), kill(trainer))), max_steps=9)
    fails(trainer, WorkerError, r"evaluation process \(pid \d+\) was killed by SIGKILL", gated(gate))
    last = read_checkpoint(trainer.run.checkpoints / "last.ckpt")
    assert last["counters"]["step"] == 2
    assert not (trainer.run.checkpoints / "best.ckpt").exists()
    (gate / "open").touch()
    resumed = make(tmp_path)
    resumed.fit(tiny(), gated(gate), ckpt_path="last")
    assert resumed.state.counters.step == 3


def test_a_killed_evaluation_that_is_waited_for_ends_the_run(tmp_path: Path) -> None:
    """At the end of a run nothing else would ever wake it."""
    gate = tmp_path / "gate"

    class Killing(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            await_evaluation(gate)
            os.kill(process(trainer).pid, signal.SIGKILL)

    trainer = make(tmp_path, Killing(), max_steps=1)
    fails(trainer, WorkerError, "was killed by SIGKILL", gated(gate))
    assert trainer.state.counters.step == 1


def test_a_process_that_ends_between_two_evaluations_ends_the_run(tmp_path: Path) -> None:
    """Before the next validation is due, which it could only miss."""
    trainer = make(tmp_path, max_steps=-1)

    class Killing(Callback):
        def on_evaluation_end(self, trainer: AsyncTrainer, result: Any) -> None:
            kill(trainer)

    trainer.callbacks.append(Killing())
    fails(trainer, WorkerError, "was killed by SIGKILL", ClockEnvs())


@pytest.mark.parametrize("max_steps", [1, -1], ids=["waited for", "training"])
def test_an_env_that_raises_in_evaluation_ends_the_run_with_its_own_traceback(tmp_path: Path, max_steps: int) -> None:
    """Through two processes: the env's worker and the one that evaluates."""
    gate = tmp_path / "gate"
    env = gated(gate, breaks=True)
    (gate / "open").touch()
    message = r"(?s)evaluation process failed with\nTraceback.*env worker \d failed with\nTraceback.*the gate fell shut"
    fails(make(tmp_path, max_steps=max_steps), WorkerError, message, env)


class Unportable(KnownPolicy):
    """Cannot be unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if multiprocessing.current_process().name == "evaluation-process":
            raise ImportError("the policy's code is not there")
        super().__setstate__(state)


def test_a_policy_that_does_not_get_there_ends_the_run(tmp_path: Path) -> None:
    """It fails before it could say that it is ready."""
    policy = Unportable()
    policy.objective = PPO()
    fails(
        make(tmp_path, max_steps=-1),
        WorkerError,
        "(?s)evaluation process failed with.*code is not there",
        ClockEnvs(),
        policy,
    )


def test_an_action_that_is_not_finite_spoils_no_checkpoint(tmp_path: Path) -> None:
    """As in turn: the weights may be what broke it, so they must not become the last checkpoint."""
    policy = KnownPolicy(nan_at=4)  # training never gets so far
    policy.objective = PPO()
    trainer = make(tmp_path, max_steps=2)
    trainer.fit_loop = SyncFitLoop(decisions_per_env=1, update_epochs=1)
    fails(trainer, FloatingPointError, "(?s)evaluation process failed with.*not finite", ClockEnvs(), policy)
    assert not trainer.run.checkpoints.exists()


def test_a_failed_run_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    """One that hangs least of all; the same trainer can go on."""
    gate, pids = tmp_path / "gate", []

    def fail(trainer: AsyncTrainer) -> None:
        await_evaluation(gate)
        pids.append(process(trainer).pid)
        raise ArithmeticError("of training")

    failing = At(1, fail)
    trainer = make(tmp_path, failing)
    fails(trainer, ArithmeticError, "of training", gated(gate))
    assert not is_running(pids[0])
    failing.step = 99
    (gate / "open").touch()
    trainer.fit(tiny(), gated(gate))
    assert trainer.state.counters.step == 3


def test_ctrl_c_ends_a_run_while_it_evaluates(tmp_path: Path) -> None:
    """All processes get it, and those of the evaluation are in the middle of an episode that never ends."""
    with run(tmp_path, "beside", "-X", "dev", "-W", "error::ResourceWarning") as running:
        wait_for_step(running, tmp_path, 2)
        await_evaluation(tmp_path / "gate")
        os.killpg(running.pid, signal.SIGINT)
        running.wait(timeout=200)
        wait_until(lambda: not processes_of_session(running.pid), "no process is left")
    assert running.returncode != 0
    assert "KeyboardInterrupt: SIGINT" in said(tmp_path)
    for word in ("ResourceWarning", "leaked", "env worker", "evaluation process"):
        assert word not in said(tmp_path)
    assert resume(tmp_path, ClockEnvs(), BESIDE | {"val_every_n_steps": 0}) >= 2


def test_a_killed_run_takes_its_evaluation_with_it(tmp_path: Path) -> None:
    """The kernel's memory killer leaves nobody to tell it."""
    with run(tmp_path, "beside") as running:
        await_evaluation(tmp_path / "gate")
        assert len(processes_of_session(running.pid)) >= 6, "training, its workers, the evaluation and its workers"
        os.kill(running.pid, signal.SIGKILL)
        running.wait(timeout=200)
        wait_until(lambda: not processes_of_session(running.pid), "no process is left")
