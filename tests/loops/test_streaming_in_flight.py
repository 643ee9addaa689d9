"""What is in flight when a checkpoint is written is saved, and consumed first after a resume; or lost, and counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.fakes import ClockEnvs, equal, wait_until
from tests.loops.streaming_fakes import HeldEnvs, SpyGRPO, SpyPPO, balance, fit, known
from vla_async import keys
from vla_async.callbacks import Callback, Checkpoint
from vla_async.loops import rollouts as module
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer

TRAJ = ("collector", "traj_ids")


class AtStep(Callback):
    """After a step, waits until some finished bundles wait in the queue, then does something."""

    def __init__(self, step: int, waiting: int, then: Callable[[AsyncTrainer], object] = lambda trainer: None) -> None:
        self.step, self.waiting, self.then = step, waiting, then

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.step:
            queue = trainer.fit_loop._fleet.queue
            wait_until(lambda: len(queue) >= self.waiting, f"{self.waiting} bundles wait")
            self.then(trainer)


def last(trainer: AsyncTrainer) -> Path:
    return trainer.run.checkpoints / "last.ckpt"


def rollouts_of(path: Path) -> dict[str, Any]:
    return dict(read_checkpoint(path)["loop"]["rollouts"])


def saved_ids(path: Path) -> list[int]:
    """The trajectory that each saved slot begins with."""
    saved = rollouts_of(path)["waiting"]
    ids = saved["leaves"]["/".join(TRAJ)].reshape(len(saved["lengths"]), -1)
    return [int(number) for number in ids[:, 0]]


def ids(prepared: list[TensorDictBase]) -> list[int]:
    return [int(number) for part in prepared for number in part[TRAJ][:, 0]]


def test_a_resumed_run_consumes_what_was_saved_just_as_the_run_itself_did(tmp_path: Path) -> None:
    """All slots wait when the checkpoint is written, so what comes next is the same in both: data, weights, counters."""
    first, again = SpyPPO(), SpyPPO()
    settings: dict[str, Any] = {"max_staleness": 2, "in_flight": "save", "update_epochs": 2, "micro_batch_size": 2}

    def keep(trainer: AsyncTrainer) -> None:
        trainer.save_checkpoint("kept", finished_step=True)
        shutil.copy(trainer.run.checkpoints / "kept.ckpt", tmp_path / "kept.ckpt")

    envs = ClockEnvs(num_envs=3)
    trainer, steps = fit(tmp_path, known(first), envs, AtStep(3, 9, keep), max_steps=4, **settings)
    kept = rollouts_of(tmp_path / "kept.ckpt")
    assert kept["waiting"]["sizes"] == [1] * 9
    assert sorted(ids(first.prepared[9:])) == sorted(set(ids(first.prepared[9:])) & set(saved_ids(tmp_path / "kept.ckpt")))
    other, more = fit(tmp_path, known(again), envs, max_steps=4, ckpt_path=str(tmp_path / "kept.ckpt"), **settings)
    assert len(first.prepared[9:]) == len(again.prepared) == 3
    for left, right in zip(first.prepared[9:], again.prepared, strict=True):
        assert equal(dict(left.items(True, True)), dict(right.items(True, True)))
    assert equal(trainer.policy.state_dict(), other.policy.state_dict())
    assert more[4]["queue/consumed"] == steps[4]["queue/consumed"] == 12.0
    assert more[4].get("queue/dropped/resume", 0.0) == 0.0
    assert balance(more[4])


def test_what_is_saved_comes_first_and_no_episode_is_played_again(tmp_path: Path) -> None:
    first, again = SpyPPO(), SpyPPO()
    settings: dict[str, Any] = {"max_staleness": 3, "in_flight": "save"}
    trainer, _ = fit(tmp_path, known(first), ClockEnvs(), AtStep(3, 4), max_steps=3, **settings)
    waiting = saved_ids(last(trainer))
    assert len(waiting) >= 4
    _, more = fit(tmp_path, known(again), ClockEnvs(), max_steps=9, ckpt_path=str(last(trainer)), **settings)
    assert sorted(ids(again.prepared)[: len(waiting)]) == sorted(waiting)
    assert not set(ids(first.prepared)) & set(ids(again.prepared)), "something was trained on twice"
    played = [int(seed) for part in again.prepared for seed in part["collector", "seed"].flatten()]
    before = {int(seed) for part in first.prepared for seed in part["collector", "seed"].flatten()}
    fresh = torch.cat([part.reshape(-1) for part in again.prepared[len(waiting) :]])
    assert not before & set(fresh["collector", "seed"].flatten().tolist()), "an episode was played again"
    assert len(played) == len(again.prepared) * 3
    assert max(metrics["staleness/max"] for metrics in more.values()) <= 3.0
    assert all(balance(metrics) for metrics in more.values())
    assert more[9]["queue/consumed"] == 18.0


def test_what_is_in_progress_is_lost_and_counted(tmp_path: Path) -> None:
    """One env is held in its first fragment when the checkpoint is written."""
    gate = tmp_path / "gate"
    gate.touch()
    settings: dict[str, Any] = {"max_staleness": 3, "in_flight": "save", "fragments_per_update": 1}
    envs = HeldEnvs(gate=str(gate), held_env=1)

    def look(trainer: AsyncTrainer) -> None:
        trainer.save_checkpoint("kept", finished_step=True)
        shutil.copy(trainer.run.checkpoints / "kept.ckpt", tmp_path / "kept.ckpt")
        gate.unlink()

    fit(tmp_path, known(SpyPPO()), envs, AtStep(1, 3, look), max_steps=1, **settings)
    kept = rollouts_of(tmp_path / "kept.ckpt")
    assert kept["queue"] == {"produced": 5, "consumed": 1, "in_flight": 4}
    assert kept["counts"]["episodes"][1] == 1
    again = SpyPPO()
    _, more = fit(tmp_path, known(again), envs, max_steps=5, ckpt_path=str(tmp_path / "kept.ckpt"), **settings)
    assert more[2]["queue/dropped/resume"] == 1.0
    numbers = [number for number in ids(again.prepared) if number % 2]
    assert all(number >= 3 for number in numbers), "the held env's first episode was played again"
    assert all(balance(metrics) for metrics in more.values())


def test_whole_groups_are_saved_and_the_finished_members_of_others_are_counted(tmp_path: Path) -> None:
    """One member of group 1 is held, so the other has finished and waits; group 0 has whole groups that wait."""
    gate = tmp_path / "gate"
    gate.touch()
    first, again = SpyGRPO(group_size=2), SpyGRPO(group_size=2)
    settings: dict[str, Any] = {"max_staleness": 3, "in_flight": "save", "fragments_per_update": 2}

    def look(trainer: AsyncTrainer) -> None:
        queue = trainer.fit_loop._fleet.queue
        wait_until(lambda: len(queue) >= 0 and queue._groups.waiting >= 1, "a member waits for the other")
        trainer.save_checkpoint("kept", finished_step=True)
        shutil.copy(trainer.run.checkpoints / "kept.ckpt", tmp_path / "kept.ckpt")
        gate.unlink()

    envs = HeldEnvs(num_envs=4, gate=str(gate), held_env=3)
    fit(tmp_path, known(first), envs, AtStep(1, 1, look), max_steps=1, **settings)
    kept = rollouts_of(tmp_path / "kept.ckpt")
    assert set(kept["waiting"]["sizes"]) == {2}
    lost = kept["queue"]["in_flight"] - sum(kept["waiting"]["sizes"])
    assert lost >= 2, "the one that waits and the one that is held"
    whole = len(kept["waiting"]["sizes"])
    _, more = fit(tmp_path, known(again), envs, max_steps=8, ckpt_path=str(tmp_path / "kept.ckpt"), **settings)
    groups = [int(part[keys.GROUP_ID][0, 0]) for part in again.prepared]
    saved = kept["waiting"]["leaves"]["group_id"].reshape(2 * whole, -1)[:, 0].tolist()
    assert sorted(groups[:whole]) == sorted(set(saved))
    assert len(set(groups)) == 7, "a group was played twice"
    assert not set(groups) & {int(part[keys.GROUP_ID][0, 0]) for part in first.prepared}
    assert [len(part) for part in again.prepared] == [2] * 7
    assert more[2]["queue/dropped/resume"] == lost
    assert max(metrics["staleness/max"] for metrics in more.values()) <= 3.0
    assert all(balance(metrics) for metrics in more.values())


@pytest.mark.parametrize("fails_at", [3, 4])
def test_what_an_update_had_taken_when_the_run_broke_is_saved_too(fails_at: int, tmp_path: Path) -> None:
    """The checkpoint is of the last whole step, so the broken update is made again, of the same trajectories."""

    class Breaks(SpyPPO):
        def prepare(self, trajectories: TensorDictBase) -> TensorDictBase:
            prepared = super().prepare(trajectories)
            if len(self.prepared) == fails_at:  # the first, or the second and last, of the second update
                raise LookupError("the objective lost its way")
            return prepared

    first, again = Breaks(), SpyPPO()
    settings: dict[str, Any] = {"max_staleness": 2, "in_flight": "save"}
    with pytest.raises(LookupError):
        fit(tmp_path, known(first), ClockEnvs(), max_steps=3, **settings)
    [path] = tmp_path.rglob("last.ckpt")
    _, more = fit(tmp_path, known(again), ClockEnvs(), max_steps=4, ckpt_path=str(path), **settings)
    taken = ids(first.prepared[2:])
    assert set(taken) <= set(ids(again.prepared[:2])), "what the broken update had taken does not come first"
    assert balance(more[4])
    assert more[4]["queue/consumed"] == 8.0


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_under_another_bound_what_is_too_old_is_dropped_and_counted(eta: int, tmp_path: Path) -> None:
    """Eight of two versions wait; with a lower bound there is room for fewer, and the newest of them are kept."""
    settings: dict[str, Any] = {"in_flight": "save", "max_staleness": 3}
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), AtStep(2, 8), max_steps=2, **settings)
    kept = rollouts_of(last(trainer))
    assert len(kept["waiting"]["sizes"]) == 8
    again = SpyPPO()
    lower = settings | {"max_staleness": eta, "train_async": eta > 0}
    _, more = fit(tmp_path, known(again), ClockEnvs(), max_steps=6, ckpt_path=str(last(trainer)), **lower)
    assert max(metrics["staleness/max"] for metrics in more.values()) <= eta
    assert all(balance(metrics) for metrics in more.values())
    assert {metrics["staleness/bound"] for metrics in more.values()} == {float(eta)}
    lost = sum(value for name, value in more[6].items() if name in ("queue/dropped/resume", "queue/dropped/stale"))
    assert (lost == 0.0) == (eta == 3)
    used = set(ids(again.prepared)) & set(saved_ids(last(trainer)))
    assert len(used) == 8 - lost


def test_other_slots_get_nothing_of_what_was_saved_and_it_is_said(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"in_flight": "save", "max_staleness": 3}
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), AtStep(2, 4), max_steps=2, **settings)
    kept = rollouts_of(last(trainer))
    with pytest.warns(UserWarning, match=r"trajectories in flight are dropped.*fit_loop.decisions_per_env"):
        _, more = fit(
            tmp_path,
            known(SpyPPO()),
            ClockEnvs(),
            max_steps=3,
            ckpt_path=str(last(trainer)),
            **(settings | {"decisions_per_env": 2}),
        )
    assert more[3]["queue/dropped/resume"] == kept["queue"]["in_flight"]
    assert balance(more[3])


def test_who_resumes_without_saving_leaves_what_was_saved_and_counts_it(tmp_path: Path) -> None:
    saves: dict[str, Any] = {"in_flight": "save", "max_staleness": 3}
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), AtStep(2, 4), max_steps=2, **saves)
    kept = rollouts_of(last(trainer))
    again = SpyPPO()
    _, more = fit(tmp_path, known(again), ClockEnvs(), max_steps=3, max_staleness=3, ckpt_path=str(last(trainer)))
    assert not set(ids(again.prepared)) & set(saved_ids(last(trainer)))
    assert more[3]["queue/dropped/resume"] == kept["queue"]["in_flight"]


@pytest.mark.parametrize("in_flight", ["drop", "save"])
def test_slots_are_copied_only_when_a_checkpoint_is_written(
    in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    save_bundles = module.save_bundles

    def counted(slab: Any, bundles: Any) -> dict[str, Any]:
        copies.append(len(bundles))
        return save_bundles(slab, bundles)

    monkeypatch.setattr(module, "save_bundles", counted)
    every = Checkpoint(every_n_steps=4, every_s=0.0, save_last=False)
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), every, max_steps=10, in_flight=in_flight)
    assert len(copies) == (3 if in_flight == "save" else 0), "two checkpoints, and for one that is written at the end"
    assert ("waiting" in rollouts_of(last(trainer))) == (in_flight == "save")


# ---------------------------------------------------------------- the bound


class Lowers(Callback):
    """Lowers η after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.step:
            trainer.fit_loop.lower_staleness(1)


@pytest.mark.parametrize("in_flight", ["drop", "save"])
@pytest.mark.parametrize("saved", ["at the end", "after the step", "after the step, by who was told first"])
def test_a_bound_that_is_lowered_in_the_last_step_is_that_of_the_checkpoint(
    in_flight: str, saved: str, tmp_path: Path
) -> None:
    every = Checkpoint(every_n_steps=0 if saved == "at the end" else 3)
    callbacks: list[Callback] = [every, Lowers(3)] if saved.endswith("first") else [Lowers(3), every]
    settings: dict[str, Any] = {"max_staleness": 3, "in_flight": in_flight}
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), *callbacks, max_steps=3, **settings)
    assert rollouts_of(last(trainer))["max_staleness"] == 1
    _, more = fit(tmp_path, known(SpyPPO()), ClockEnvs(), max_steps=6, ckpt_path=str(last(trainer)), **settings)
    assert {metrics["staleness/bound"] for metrics in more.values()} == {1.0}
    assert all(balance(metrics) for metrics in more.values())


@pytest.mark.parametrize("in_flight", ["drop", "save"])
@pytest.mark.parametrize("before", [{"max_staleness": 1}, {"max_staleness": 0, "train_async": False, "streamer": False}])
def test_a_resumed_run_has_the_bound_that_it_is_given(before: dict[str, Any], in_flight: str, tmp_path: Path) -> None:
    """A run that was synchronous, or narrower, would stay so for ever, whatever its settings say."""
    common: dict[str, Any] = {"in_flight": in_flight}
    trainer, _ = fit(tmp_path, known(SpyPPO()), ClockEnvs(), max_steps=2, **common, **before)
    wider: dict[str, Any] = {"max_staleness": 3, "ckpt_path": str(last(trainer))}
    _, more = fit(tmp_path, known(SpyPPO()), ClockEnvs(), max_steps=5, **common, **wider)
    assert {metrics["staleness/bound"] for metrics in more.values()} == {3.0}
    assert all(balance(metrics) for metrics in more.values())
