"""EnvPool: rows, and everything that can go wrong with a worker."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes import ACTION_DIM, ClockEnvs, Stillborn, is_running, wait_until
from vla_async.collectors.pool import EnvPool, WorkerError
from vla_async.collectors.worker import Rows
from vla_async.envs import ToyEnvs
from vla_async.rng import normal


def chunks(pool: EnvPool, step: int) -> Tensor:
    """Actions that depend on the row and the step alone."""
    base = torch.arange(pool.num_envs) * 1000 + step
    return 0.3 * normal(base, pool.spec.chunk_size, pool.spec.action_dim)


def play(pool: EnvPool, steps: int) -> list[dict[str, Tensor]]:
    """All rows after a reset and after each of a few steps with resets in them."""
    num = pool.num_envs
    pool.reset(torch.ones(num, dtype=torch.bool), torch.arange(num))
    seen = []
    for step in range(steps):
        pool.step(chunks(pool, step), next_seeds=torch.arange(num) + 10 * (step + 1))
        rows = {name: value for name, value in vars(pool.rows).items() if isinstance(value, Tensor)}
        rows |= {f"observation.{name}": leaf for name, leaf in pool.rows.observation.items()}
        rows |= {f"final.{name}": leaf for name, leaf in pool.rows.final_observation.items()}
        seen.append({name: value.clone() for name, value in rows.items()})
    return seen


def pids(pool: EnvPool) -> list[int]:
    return [link.process.pid for link in pool._links if link.process.pid is not None]


@pytest.mark.parametrize(
    "options",
    [{"success_at": 3, "success_every": 2}, {"failure_at": 4, "success_at": 2, "on_success": "finish_chunk"}, {}],
    ids=["success", "failure", "truncation"],
)
def test_rows_of_processes_equal_rows_of_one_batch(options: dict[str, object]) -> None:
    """Where an env runs must not matter: episodes that end at different times included."""
    played = []
    for batched in (False, True):
        with EnvPool(ClockEnvs(num_envs=3, wordy=True, image=True, batched=batched, **options)) as pool:  # type: ignore[arg-type]
            played.append(play(pool, steps=7))
            played.append([{"words": torch.tensor([hash(text) for text in pool.instructions])}])
    processes, words, batch, batch_words = played
    assert words[0]["words"].equal(batch_words[0]["words"])
    for step, (left, right) in enumerate(zip(processes, batch, strict=True)):
        for name in left:
            assert left[name].equal(right[name]), f"{name} differs at step {step}"


def test_toy_rows_of_processes_equal_rows_of_one_batch() -> None:
    """The same for the toy envs, whose targets are random."""
    played = []
    for batched in (False, True):
        with EnvPool(ToyEnvs(num_envs=2, chunk_size=3, max_episode_steps=5, obs="rgb+state", batched=batched)) as pool:
            played.append(play(pool, steps=4))
    for left, right in zip(*played, strict=True):
        assert all(left[name].equal(right[name]) for name in left)


def test_final_observation_survives_the_reset() -> None:
    """At an episode's end one observation is the ended episode's and the other the next one's."""
    with EnvPool(ClockEnvs(num_envs=1, max_episode_steps=3)) as pool:
        pool.reset(torch.tensor([True]), torch.tensor([5]))
        pool.step(torch.zeros(1, 2, ACTION_DIM), next_seeds=torch.tensor([6]))
        assert pool.rows.observation["state"][0, :2].tolist() == [5, 2]
        pool.step(torch.zeros(1, 2, ACTION_DIM), next_seeds=torch.tensor([6]))
        assert pool.rows.final_observation["state"][0, :2].tolist() == [5, 3]
        assert pool.rows.observation["state"][0, :2].tolist() == [6, 0]
        assert pool.rows.executed[0].tolist() == [True, False]
        assert bool(pool.rows.truncated[0])


def test_inactive_envs_stand_still() -> None:
    """A step of some envs must not move the others."""
    for batched in (False, True):
        with EnvPool(ClockEnvs(num_envs=2, batched=batched)) as pool:
            pool.reset(torch.tensor([True, True]), torch.tensor([1, 2]))
            pool.step(torch.ones(2, 2, ACTION_DIM), active=torch.tensor([False, True]))
            assert pool.rows.observation["state"][:, 1].tolist() == [0, 2]
            pool.reset(torch.tensor([True, False]), torch.tensor([3, 3]))
            assert pool.rows.observation["state"][:, :2].tolist() == [[3, 0], [2, 2]]


def test_only_the_chosen_indices_are_built() -> None:
    """A wave of tasks is a choice of envs; each must run its own task."""
    with EnvPool(ClockEnvs(num_envs=3, names=("a", "b", "c")), indices=[2, 1]) as pool:
        pool.reset(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
        assert pool.tasks == ["c", "b"]


def test_pictures_are_of_the_executed_env_steps_of_the_first_row() -> None:
    """A batch goes on while one row does, but a video must end with its episode, and a reset elsewhere must not stop it."""
    for batched in (False, True):
        with EnvPool(ClockEnvs(num_envs=2, max_episode_steps=5, batched=batched), render=[0]) as pool:
            pool.reset(torch.tensor([True, True]), torch.tensor([0, 0]), record=torch.tensor([True, False]))
            values: list[int] = []
            for step in range(3):
                frames = pool.step(torch.zeros(2, 2, ACTION_DIM))
                values += [int(frame[0, 0, 0]) for frame in frames[0]]
                if step == 0:
                    pool.reset(torch.tensor([False, True]), torch.tensor([0, 1]))
            assert values == [10, 20, 30, 40, 50]
            after = pool.step(torch.zeros(2, 2, ACTION_DIM), active=torch.tensor([False, True]))
            assert not after, "pictures of an env that does not run"
            pool.reset(torch.tensor([True, False]), torch.tensor([0, 0]))
            assert not pool.step(torch.zeros(2, 2, ACTION_DIM)), "pictures of an episode that is not recorded"


def test_long_recordings_do_not_use_up_files() -> None:
    """Pictures sent as tensors would each hold a file open in this process."""
    with EnvPool(ClockEnvs(num_envs=1, chunk_size=10, max_episode_steps=1000), render=[0]) as pool:
        pool.reset(torch.tensor([True]), torch.tensor([0]), record=torch.tensor([True]))
        kept, before = [], len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            kept += pool.step(torch.zeros(1, 10, ACTION_DIM))[0]
        assert len(kept) == 40
        assert len(os.listdir("/proc/self/fd")) < before + 10


@pytest.mark.parametrize("where", ["build", "reset", "step"])
def test_an_error_comes_with_the_workers_own_traceback(where: str) -> None:
    """Whoever writes an env must see which of its lines failed."""
    pool: EnvPool | None = None
    with pytest.raises(WorkerError) as caught:  # noqa: PT012
        pool = EnvPool(ClockEnvs(fault=f"raise-in-{where}", fault_env=1))
        with pool:
            pool.reset(torch.tensor([True, True]), torch.tensor([1, 2]))
            pool.step(torch.zeros(2, 2, ACTION_DIM))
    message = str(caught.value)
    assert message.startswith("env worker 1 failed with")
    assert f"ArithmeticError: the clock of env 1 broke in {where}" in message
    assert "in _fail" in message
    assert "fakes.py" in message


def test_a_killed_worker_is_noticed_at_once(tmp_path: Path) -> None:
    """The kernel kills when memory runs out; waiting for timeout_s would hide the reason for minutes."""
    flag = tmp_path / "stepping"
    factory = ClockEnvs(fault="hang-in-step", fault_env=1, flag=str(flag))
    with EnvPool(factory, timeout_s=250.0) as pool:
        everyone = torch.tensor([True, True])
        pool.reset(everyone, torch.tensor([1, 2]))
        victim = pids(pool)[1]

        def kill() -> None:
            wait_until(flag.exists, "the worker steps")
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(WorkerError, match=rf"env worker 1 \(pid {victim}\) was killed by SIGKILL.*memory"):
            pool.step(torch.zeros(2, 2, ACTION_DIM))
        killer.join()
        others = pids(pool)
    assert not any(map(is_running, others))


def test_an_endless_timeout_is_legal() -> None:
    """The kernel takes no infinite wait as a number."""
    with EnvPool(ClockEnvs(), timeout_s=float("inf")) as pool:
        pool.reset(torch.ones(2, dtype=torch.bool), torch.arange(2))
        assert pool.rows.active.all()


def test_a_worker_killed_between_commands_is_noticed() -> None:
    """The next command must not wait for an answer that cannot come."""
    with EnvPool(ClockEnvs(), timeout_s=250.0) as pool:
        victim = pids(pool)[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_running(victim), "the worker dies")
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            pool.reset(torch.tensor([True, True]), torch.tensor([1, 2]))


def test_a_hung_worker_is_named_and_killed() -> None:
    """A simulator that never returns must neither hang the run nor survive it."""
    with EnvPool(ClockEnvs(fault="hang-in-step", fault_env=1)) as pool:
        pool.timeout_s = 0.5
        pool.reset(torch.tensor([True, True]), torch.tensor([1, 2]))
        workers = pids(pool)
        with pytest.raises(
            WorkerError, match=r"no answer within 0.5 s from env worker 1; .*fit_loop.env_timeout_s, evaluate"
        ):
            pool.step(torch.zeros(2, 2, ACTION_DIM))
        pool.close(grace_s=0.1)
    assert not any(map(is_running, workers))


def test_a_pool_that_lost_step_refuses_further_commands() -> None:
    """A late answer to an earlier command must never be taken for the answer to a later one."""
    with EnvPool(ClockEnvs(fault="hang-in-step")) as pool:
        pool.timeout_s = 0.2
        everyone = torch.tensor([True, True])
        pool.reset(everyone, torch.tensor([1, 2]))
        with pytest.raises(WorkerError, match="no answer"):
            pool.step(torch.zeros(2, 2, ACTION_DIM))
        with pytest.raises(WorkerError, match="cut short; make a new one"):
            pool.reset(everyone, torch.tensor([1, 2]))
    with pytest.raises(WorkerError, match="this pool is closed"):
        pool.reset(everyone, torch.tensor([1, 2]))


def test_workers_that_disagree_are_refused() -> None:
    """Rows of different shapes do not fit in one batch; both shapes are named."""
    with pytest.raises(WorkerError, match=r"env worker 1 has EnvSpec.*state_dim=8.*env worker 0 has.*state_dim=4"):
        EnvPool(ClockEnvs(odd_env=1))


def test_close_leaves_no_process_and_may_be_called_again() -> None:
    """Every simulator left behind would hold its memory for as long as the run."""
    pool = EnvPool(ClockEnvs(num_envs=3))
    workers = pids(pool)
    assert len(workers) == 3
    assert all(map(is_running, workers))
    pool.close()
    assert not any(map(is_running, workers))
    pool.close()


def test_a_pool_that_fails_to_start_leaves_no_process(tmp_path: Path) -> None:
    """The envs that could be built must not survive the one that could not."""
    before = set(children_of_the_fork_server())
    with pytest.raises(WorkerError):
        EnvPool(ClockEnvs(num_envs=3, fault="raise-in-build", fault_env=2))
    wait_until(lambda: set(children_of_the_fork_server()) <= before, "the workers end")


def test_a_forgotten_pool_ends_its_workers() -> None:
    """A pool that nobody closes must not keep simulators alive."""
    pool = EnvPool(ClockEnvs())
    workers = pids(pool)
    del pool
    wait_until(lambda: not any(map(is_running, workers)), "the workers end")


def children_of_the_fork_server() -> list[int]:
    from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]

    server = _forkserver._forkserver_pid
    if server is None:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_running(int(entry.name)):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            found += [int(entry.name)] if parent == server else []
    return found


def test_workers_ignore_the_signals_meant_for_the_run() -> None:
    """Ctrl-C reaches every process of a terminal, and a scheduler's SIGTERM every process of a job."""
    with EnvPool(ClockEnvs()) as pool:
        everyone = torch.tensor([True, True])
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in pids(pool):
                os.kill(pid, number)
        pool.reset(everyone, torch.tensor([1, 2]))
        pool.step(torch.zeros(2, 2, ACTION_DIM))
        assert pool.rows.observation["state"][:, 1].tolist() == [2, 2]


def test_a_worker_that_never_gets_to_its_env_points_at_the_main_guard() -> None:
    """The usual first mistake with worker processes: the reader must learn what to write."""
    with pytest.raises(WorkerError, match=r"ended by itself \(exit code 1\).*under `if __name__ == '__main__':`"):
        EnvPool(Stillborn())


def test_rows_are_shared_and_narrow_to_a_worker() -> None:
    """What a worker writes into its part must be what the pool reads."""
    with EnvPool(ClockEnvs(num_envs=1, image=True)) as pool:
        rows = Rows.allocate(4, pool.spec)
    part = rows.part(slice(1, 3))
    part.chunk.fill_(1.0)
    part.observation["image"].fill_(7)
    assert rows.chunk.sum((1, 2)).tolist() == [0, 4, 4, 0]
    assert rows.observation["image"].float().mean((1, 2, 3)).tolist() == [0, 7, 7, 0]
    assert all(value.is_shared() for value in vars(rows).values() if isinstance(value, Tensor))
