"""GRPO in the streaming loop: groups start in one state, come whole, never wait for each other and survive their members."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.collectors.rollout_fakes import OnceFaulty
from tests.fakes import ClockEnvs, make_trainer, tiny, wait_until
from tests.loops.streaming_fakes import HeldEnvs, SpyGRPO, balance, fit, known
from vla_async import keys
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import GRPO
from vla_async.trainer import AsyncTrainer

LUCKY: dict[str, Any] = {"num_envs": 8, "names": ("a", "b"), "lucky": True, "max_episode_steps": 9}


@pytest.mark.parametrize("streamer", [True, False])
def test_a_group_is_whole_and_starts_in_one_state_with_noise_of_its_own(streamer: bool, tmp_path: Path) -> None:
    objective = SpyGRPO(group_size=2)
    _, steps = fit(tmp_path, known(objective), HeldEnvs(**LUCKY), streamer=streamer, fragments_per_update=4, max_staleness=3)
    assert len(objective.prepared) == 4 * (2 if streamer else 1)
    seen: set[int] = set()
    lengths: set[int] = set()
    for prepared in objective.prepared:
        ids = prepared[keys.GROUP_ID][:, 0, 0]
        assert (prepared[keys.GROUP_ID] == ids.reshape(-1, 1, 1)).all(), "padding has another group"
        for group in ids.unique().tolist():
            members = prepared[ids == group]
            assert len(members) == 2
            assert group not in seen
            seen.add(group)
            assert len(members["collector", "seed"][:, 0].unique()) == 1
            assert len(members[keys.STATE][:, 0].unique(dim=0)) == 1, "the members start in different states"
            assert not torch.equal(*members[keys.CHUNK][:, 0]), "the members do the same"
            lengths |= set(members[keys.EXECUTED].any(-1).sum(-1).tolist())
    assert len(lengths) > 1, "all episodes were equally long, which shows little"
    assert all(balance(metrics) for metrics in steps.values())
    assert steps[4]["grpo/groups"] == 2.0
    assert steps[4]["queue/consumed"] == 16.0


@pytest.mark.parametrize(
    "settings",
    [
        {"train_async": False, "streamer": False, "async_interaction": False},
        {"async_interaction": False},
        {"envs_per_worker": 3, "fragments_per_update": 2, "max_staleness": 5},
        {"batched": True},
        {"batched": True, "async_interaction": False, "num_stages": 2},
        {"batched": True, "num_stages": 8, "fragments_per_update": 4},
        {"batched": True, "max_batch_size": 3, "train_async": False},
        {"straggler": "drop", "max_staleness": 1},
    ],
    ids=str,
)
def test_no_setting_lets_the_envs_wait_for_each_other(settings: dict[str, Any], tmp_path: Path) -> None:
    """Slots are scarce, episodes end at different times: a row that waits for a slot must not hold up the others."""
    envs = HeldEnvs(**(LUCKY | {"batched": settings.pop("batched", False)}))
    _, steps = fit(tmp_path, known(SpyGRPO(group_size=2)), envs, max_steps=6, **settings)
    assert len(steps) == 6
    bound = 0 if settings.get("train_async") is False else settings.get("max_staleness", 1)
    assert max(metrics["staleness/max"] for metrics in steps.values()) <= bound
    assert all(balance(metrics) for metrics in steps.values())
    assert steps[6]["queue/dropped/stale"] == 0.0


@pytest.mark.parametrize("stages", [1, 2, 8])
def test_rows_that_stand_still_change_nothing_of_what_the_others_do(stages: int, tmp_path: Path) -> None:
    """A batched simulator plays, row by row, the episodes that single envs would, of the same tasks; only when differs."""

    def episodes(root: Path, batched: bool) -> dict[tuple[int, int], torch.Tensor]:
        objective, envs = SpyGRPO(group_size=2), HeldEnvs(**(LUCKY | {"batched": batched}))
        fit(root, known(objective), envs, max_steps=4, train_async=False, num_stages=stages if batched else 1)
        found = {}
        for prepared in objective.prepared:
            for member in prepared:
                valid = member[keys.EXECUTED].any(-1)
                name = int(member[keys.GROUP_ID][0]), int(member["collector", "traj_ids"][0])
                found[name] = torch.cat([member[valid][keys.CHUNK].flatten(), member[valid][keys.STATE].flatten()])
        return found

    single, batched = episodes(tmp_path / "single", False), episodes(tmp_path / "batched", True)
    common = single.keys() & batched.keys()
    assert len(common) >= 16
    assert all(torch.equal(single[key], batched[key]) for key in common)


class Opens(Callback):
    """Removes a file after a step."""

    def __init__(self, gate: Path, step: int) -> None:
        self.gate, self.step = gate, step

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.step:
            self.gate.unlink()


def test_short_groups_go_on_without_a_long_one_until_the_bound_asks_for_it(tmp_path: Path) -> None:
    """One env is held in its first episode until two updates were made of the other group; then it is due."""
    gate = tmp_path / "gate"
    gate.touch()
    objective = SpyGRPO(group_size=2)
    envs = HeldEnvs(num_envs=4, gate=str(gate), held_env=3)
    _, steps = fit(tmp_path, known(objective), envs, Opens(gate, 2), max_steps=4, max_staleness=2, fragments_per_update=2)
    groups = [int(prepared[keys.GROUP_ID][0, 0]) for prepared in objective.prepared]
    assert groups[:3] == [0, 2, 1], "even group ids are of the group that nobody held"
    assert steps[3]["staleness/max"] == 2.0


def test_a_member_that_is_dropped_is_missing_and_its_group_goes_on(tmp_path: Path) -> None:
    """The held env is told to end its episode while it is held; the other member alone has nothing to compare with."""
    gate = tmp_path / "gate"
    gate.touch()

    class OpensWhenCut(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            if trainer.state.counters.step == 2:
                board = trainer.fit_loop._fleet.board

                def open_gate() -> None:
                    wait_until(lambda: bool(board.cut.any()), "the held env is told to end")
                    gate.unlink()

                self.thread = threading.Thread(target=open_gate)
                self.thread.start()

    objective, opens = SpyGRPO(group_size=2), OpensWhenCut()
    envs = HeldEnvs(num_envs=4, gate=str(gate), held_env=3)
    settings: dict[str, Any] = {"max_staleness": 2, "fragments_per_update": 2, "straggler": "drop"}
    _, steps = fit(tmp_path, known(objective), envs, opens, max_steps=4, **settings)
    opens.thread.join()
    assert [len(prepared) for prepared in objective.prepared][:3] == [2, 2, 1]  # a slow machine may make another one late
    assert steps[3]["queue/dropped/straggler"] == 1.0
    assert balance(steps[4])


def test_a_member_that_dies_is_missing_and_its_group_goes_on(tmp_path: Path) -> None:
    objective = SpyGRPO(group_size=2)
    envs = OnceFaulty(num_envs=4, fault="die-in-step", fault_env=2, fault_step=8, flag=str(tmp_path / "died"))
    _, steps = fit(tmp_path, known(objective), envs, max_steps=8)
    sizes = [len(prepared) for prepared in objective.prepared]
    assert sorted(sizes) == [1] + [2] * 15
    assert steps[8]["worker/restarts"] == 1.0
    assert steps[8]["queue/dropped/worker ended"] == 1.0
    groups = sorted(int(prepared[keys.GROUP_ID][0, 0]) for prepared in objective.prepared)
    assert groups == sorted(set(groups))
    assert len([group for group in groups if group % 2]) >= 6, "the group of the dead env stands still"
    assert balance(steps[8])


def test_a_worker_killed_while_it_waits_for_a_slot_loses_no_episode(tmp_path: Path) -> None:
    """Its next episode had started but was in no slot yet, so the next worker plays it, and no group waits for it."""
    objective = SpyGRPO(group_size=2)

    class Kills(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            if trainer.state.counters.step == 1:
                trainer.fit_loop._fleet.publisher.confirm()
                os.kill(trainer.fit_loop._fleet._workers[1].process.pid, signal.SIGKILL)

    _, steps = fit(tmp_path, known(objective), ClockEnvs(num_envs=2), Kills(), max_steps=5, train_async=False)
    assert steps[5]["worker/restarts"] == 1.0
    assert len(objective.prepared) == 5
    assert sum(2 - len(prepared) for prepared in objective.prepared) == steps[5].get("queue/dropped/worker ended", 0.0)


def test_an_update_of_equal_groups_counts_but_steps_no_optimizer(tmp_path: Path) -> None:
    """Its version is published too, so that a version is a number of updates."""
    envs = ClockEnvs(num_envs=4, failure_at=3, max_episode_steps=9)  # every episode ends at the same step
    policy = known(SpyGRPO(group_size=2, outcome="success_once"))
    trainer, steps = fit(tmp_path, policy, envs, max_steps=5)
    assert trainer.state.counters.optimizer_steps == 0
    assert steps[5]["grpo/equal_groups"] == steps[5]["grpo/groups"] == 2.0
    newest = max(int(prepared[keys.POLICY_VERSION].max()) for prepared in policy.objective.prepared)
    assert newest >= 3, "rollouts went on with an old version"


def test_grpo_learns_in_the_streaming_loop(tmp_path: Path) -> None:
    """The members of a group must be compared with each other: else there is nothing to learn here."""
    envs = ToyEnvs(num_envs=8, chunk_size=2, max_episode_steps=8, success_tol=0.2, success_steps=1)
    torch.manual_seed(0)
    policy = tiny(objective=GRPO(group_size=8), lr=3e-3)
    _, steps = fit(tmp_path, policy, envs, max_steps=30, envs_per_worker=4, fragments_per_update=16, update_epochs=4)
    outcomes = [steps[step]["grpo/outcome"] for step in sorted(steps)]
    assert sum(outcomes[-10:]) > sum(outcomes[:10])


def test_a_resumed_run_goes_on_with_whole_groups(tmp_path: Path) -> None:
    objective = SpyGRPO(group_size=2)
    trainer, _ = fit(tmp_path, known(objective), HeldEnvs(**LUCKY), max_steps=3, max_staleness=2)
    old = {int(group) for prepared in objective.prepared for group in prepared[keys.GROUP_ID][:, 0, 0]}
    again = SpyGRPO(group_size=2)
    last = str(trainer.run.checkpoints / "last.ckpt")
    fit(tmp_path, known(again), HeldEnvs(**LUCKY), max_steps=6, max_staleness=2, ckpt_path=last)
    new = [int(group) for prepared in again.prepared for group in prepared[keys.GROUP_ID][:, 0, 0]]
    assert [len(prepared) for prepared in again.prepared] == [2] * 12
    assert not old & set(new), "a group was played twice"
    versions = [prepared[keys.POLICY_VERSION][prepared[keys.EXECUTED].any(-1)] for prepared in again.prepared]
    assert int(torch.cat(versions).min()) == 3


@pytest.mark.parametrize(
    ("envs", "objective", "loop", "message"),
    [
        ({"num_envs": 6}, {"group_size": 4}, {}, r"env.num_envs=6 must be a multiple of 4.*make it 8"),
        ({"num_envs": 6, "names": ("a", "b")}, {"group_size": 2}, {}, r"must be a multiple of 4.*2 tasks.*make it 8"),
        ({"num_envs": 4}, {"group_size": 2}, {"fragments_per_update": 5}, r"fragments_per_update=5.*multiple.*make it 6"),
        ({"num_envs": 4}, {"group_size": 2}, {"straggler": "cut"}, r"straggler='cut'.*choose wait or drop"),
        ({"num_envs": 8}, {"group_size": 2}, {"fragments_per_update": 2}, r"room for 4.*need 8.*max_staleness to 3"),
        ({"num_envs": 4}, {"group_size": 2}, {"mini_batch_size": 13}, r"mini_batch_size=13.*12 decisions.*4 trajectories"),
    ],
)
def test_what_cannot_be_grouped_is_refused_with_the_fix(
    envs: dict[str, Any], objective: dict[str, Any], loop: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, fit_loop=StreamingFitLoop(**loop), max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(known(GRPO(**objective)), ClockEnvs(**envs))
