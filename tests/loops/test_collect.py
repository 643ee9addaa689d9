"""CollectLoop: which attempts are kept, how they are counted, and what an early end leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, Steady, make_trainer
from vla_async.collectors.pool import WorkerError
from vla_async.data import Demonstrations
from vla_async.envs import ToyEnvs
from vla_async.loops import CollectLoop
from vla_async.rng import TRAIN_SEEDS, fold

THIRD: dict[str, Any] = {"success_at": 3, "success_every": 3}  # about every third seed succeeds


def loop(directory: Path, num_episodes: int = 4, **options: Any) -> CollectLoop:
    return CollectLoop(**({"controller": Steady(), "num_episodes": num_episodes, "directory": directory} | options))


def attempts_by_hand(wanted: int, seed: int) -> tuple[list[int], int]:
    """The seeds that a collection must keep, and the attempts that it takes."""
    seeds = [fold(seed, "collect", attempt) % TRAIN_SEEDS for attempt in range(100)]
    good = [attempt for attempt, each in enumerate(seeds) if each % 3 == 0][:wanted]
    return [seeds[attempt] for attempt in good], good[-1] + 1


@pytest.mark.parametrize("envs", [{"num_envs": 1}, {"num_envs": 3}, {"num_envs": 4, "batched": True}], ids=str)
def test_the_first_successes_are_kept_whatever_the_number_of_envs(tmp_path: Path, envs: dict[str, Any]) -> None:
    """If fast episodes were preferred, the demonstrations would be biased, and differ from machine to machine."""
    told: list[tuple[int, int]] = []
    report = loop(tmp_path / "set").run(ClockEnvs(**envs, **THIRD), seed=5, progress=lambda *counts: told.append(counts))
    seeds, attempts = attempts_by_hand(4, seed=5)
    data = Demonstrations(tmp_path / "set", chunk_size=1)
    assert [episode.seed for episode in data.episodes] == seeds
    assert (report.episodes, report.attempts, report.frames) == (4, attempts, 12)
    assert data.attempts == attempts
    assert all(episode.success and episode.length == 3 for episode in data.episodes)
    assert told[-1][0] >= 4
    assert [finished for _, finished in told] == list(range(1, len(told) + 1))


def test_frames_hold_what_the_controller_saw_and_did(tmp_path: Path) -> None:
    """A frame that pairs an action with a later observation teaches to act too early."""
    loop(tmp_path / "set", num_episodes=2, controller=Steady(0.5)).run(ClockEnvs(success_at=3, wordy=True), seed=5)
    data = Demonstrations(tmp_path / "set", chunk_size=1)
    seeds = [episode.seed for episode in data.episodes]
    assert [episode.instruction for episode in data.episodes] == [f"start from {seed}" for seed in seeds]
    state, action = data.frames["observation", "state"], data.frames["action"]
    assert state[:, 1].tolist() == [0, 1, 2] * 2
    assert state[:, 0].tolist() == [seed % 997 for seed in seeds for _ in range(3)]
    assert state[:, 3].tolist() == [0, 1, 2] * 2
    assert torch.equal(action, torch.full((6, 2), 0.5))
    assert data.frames["next", "reward"].flatten().tolist() == [1.5, 3.0, 4.5] * 2
    assert data.frames["next", "done"].flatten().tolist() == [False, False, True] * 2
    assert data.frames["next", "success"].flatten().tolist() == [False, False, True] * 2


def test_too_few_successes_are_an_error_that_counts_them(tmp_path: Path) -> None:
    """A short dataset must not pass for the one that was asked for; what there is stays for a look."""
    seeds, _ = attempts_by_hand(2, seed=5)
    early = [fold(5, "collect", attempt) % TRAIN_SEEDS for attempt in range(8)]
    kept = [seed for seed in early if seed % 3 == 0]
    assert 0 < len(kept) < 8, "the seed makes no case"
    with pytest.raises(RuntimeError, match=rf"only {len(kept)} of 8 attempts succeeded.*num_episodes=8; those are in .*set"):
        loop(tmp_path / "set", num_episodes=8, max_attempts=8).run(ClockEnvs(**THIRD), seed=5)
    data = Demonstrations(tmp_path / "set", chunk_size=1)
    assert [episode.seed for episode in data.episodes] == kept
    assert data.attempts == 8
    assert seeds[0] == kept[0]


def test_no_success_writes_nothing(tmp_path: Path) -> None:
    """A controller that never succeeds is the usual first state of one."""
    with pytest.raises(RuntimeError, match=r"only 0 of 4 attempts succeeded.*num_episodes=4; raise .*max_attempts or mend"):
        loop(tmp_path / "set", max_attempts=4).run(ClockEnvs(), seed=5)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_collection_replaces_nothing(tmp_path: Path) -> None:
    """Three new episodes must not take the place of fifty good ones."""
    loop(tmp_path / "set", num_episodes=3).run(ClockEnvs(success_at=2), seed=1)
    with pytest.raises(RuntimeError, match=r"only \d of 8 attempts succeeded, but collect_loop.num_episodes=8; raise"):
        loop(tmp_path / "set", num_episodes=8, max_attempts=8, overwrite=True).run(ClockEnvs(**THIRD), seed=5)
    assert len(Demonstrations(tmp_path / "set", chunk_size=1).episodes) == 3
    loop(tmp_path / "set", num_episodes=2, max_attempts=99, overwrite=True).run(ClockEnvs(**THIRD), seed=5)
    assert len(Demonstrations(tmp_path / "set", chunk_size=1).episodes) == 2


def stop_after(successes: int) -> Callable[[int, int], None]:
    def progress(found: int, finished: int) -> None:
        if found == successes:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_collection_keeps_what_it_has(tmp_path: Path) -> None:
    """Hours of collecting must not be lost to Ctrl-C; nor may an older dataset."""
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "set").run(ClockEnvs(num_envs=1, success_at=2), seed=1, progress=stop_after(2))
    data = Demonstrations(tmp_path / "set", chunk_size=1)
    assert (len(data.episodes), data.attempts) == (2, 2)
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "set", overwrite=True).run(ClockEnvs(num_envs=1, success_at=2), seed=2, progress=stop_after(1))
    assert len(Demonstrations(tmp_path / "set", chunk_size=1).episodes) == 2


def test_a_failing_controller_shows_its_own_traceback(tmp_path: Path) -> None:
    """It runs in a worker, where nobody else would see it."""
    with pytest.raises(WorkerError, match=r"(?s)env worker 0 failed with.*LookupError: the controller lost its way"):
        loop(tmp_path / "set", controller=Steady(fault_step=4)).run(ClockEnvs(num_envs=1), seed=1)


def test_what_cannot_work_is_refused_before_any_env_is_built(tmp_path: Path) -> None:
    """A simulator takes a minute to build; a wrong directory must not cost that, nor make a run directory."""
    (tmp_path / "taken").mkdir()
    broken = ClockEnvs(fault="raise-in-build")
    trainer = make_trainer(tmp_path / "runs", collect_loop=loop(tmp_path / "taken"))
    with pytest.raises(FileExistsError, match=r"collect_loop\.directory"):
        trainer.collect(None, broken)
    trainer = make_trainer(tmp_path / "runs", collect_loop=CollectLoop())
    with pytest.raises(ValueError, match=r"trainer.collect_loop.controller is not set"):
        trainer.collect(None, broken)
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_cannot_be_written_is_refused_before_any_env_is_built(tmp_path: Path) -> None:
    """Found at the end, it would cost all episodes."""
    (tmp_path / "file").touch()
    trainer = make_trainer(tmp_path / "runs", collect_loop=loop(tmp_path / "file" / "sets" / "set"))
    with pytest.raises(RuntimeError, match=r"collect_loop.directory='.*set' cannot be written \(Not a directory\); choose"):
        trainer.collect(None, ClockEnvs(fault="raise-in-build"))
    assert not (tmp_path / "runs").exists()


def test_the_settings_of_the_envs_are_noted(tmp_path: Path) -> None:
    """Without them imitation cannot see that it is shown something else."""
    CollectLoop(Steady(0.0), num_episodes=1, max_attempts=500, directory=tmp_path / "new" / "set").run(
        ToyEnvs(num_envs=1, success_tol=0.5, success_steps=1), seed=0
    )
    with pytest.raises(ValueError, match=r"collected with obs='state', but env.obs='rgb'"):
        Demonstrations(tmp_path / "new" / "set", chunk_size=1).check_env(ToyEnvs(obs="rgb"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_episodes": 0}, "collect_loop.num_episodes=0 must be at least 1"),
        ({"num_episodes": 5, "max_attempts": 4}, "collect_loop.max_attempts=4 cannot give collect_loop.num_episodes=5"),
        ({"env_timeout_s": 0.0}, "collect_loop.env_timeout_s=0.0 must be positive"),
        ({"env_timeout_s": float("nan")}, "collect_loop.env_timeout_s=nan must be positive"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        CollectLoop(**options)


def test_the_trainer_collects_into_a_run_and_ends_its_workers(tmp_path: Path) -> None:
    """The way that the command line goes."""
    trainer = make_trainer(tmp_path / "runs", collect_loop=loop(tmp_path / "set"), seed=5)
    report = trainer.collect(None, ClockEnvs(**THIRD))
    assert (report.episodes, report.attempts) == (4, attempts_by_hand(4, seed=5)[1])
    assert trainer.run.path.is_dir()
