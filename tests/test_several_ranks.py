"""A trainer on several ranks: they train as one would, on whatever each of them has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import ClockEnvs, Steady, make_trainer, tiny
from tests.loops.streaming_fakes import HeldEnvs
from tests.monitor.trace_format import check_trace
from tests.rank_cases import LOCKSTEP, Case, RecordingGRPO, RecordingPPO, rank_1
from vla_async.envs import ToyEnvs
from vla_async.loops import CollectLoop, SFTLoop, StreamingFitLoop, SyncFitLoop
from vla_async.monitor.timeline import read_timeline
from vla_async.objectives import PPO
from vla_async.state import read_checkpoint

STRATEGIES = ["size_weighted_ddp", "size_weighted_fsdp"]


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest, relative to the largest number of each tensor."""
    assert left.keys() == right.keys()
    parts = ((left[name].double(), right[name].double()) for name in left)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in parts)


def run_on_two(case: Case) -> tuple[Any, dict[str, Any]]:
    """What rank 0 returns, and what rank 1 wrote down; both must have the same weights."""
    with rank_1(case) as process:
        ran = case.run()
        process.join(20.0)
        assert process.exitcode == 0
    other = torch.load(case.root / "rank1.pt", weights_only=True)
    assert difference(ran[1].state_dict(), other["weights"]) == 0.0
    return ran, other


def compare(tmp_path: Path, strategy: str, **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """Two ranks, and one rank: the same parameters and metrics."""
    case = Case(tmp_path / "two", strategy, 2, **options)
    ran, other = run_on_two(case)
    alone = Case(tmp_path / "one", **options).run()
    assert difference(ran[1].state_dict(), alone[1].state_dict()) < 1e-5
    assert ran[2].keys() == alone[2].keys()
    for step, metrics in alone[2].items():
        assert ran[2][step] == pytest.approx(metrics, rel=1e-3, abs=1e-6)
    return ran, other, alone


@pytest.mark.parametrize("streamer", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one_on_an_uneven_split(strategy: str, streamer: bool, tmp_path: Path) -> None:
    """Three fragments for two ranks; two epochs; advantages are normalised by what all ranks have seen."""
    ran, other, alone = compare(tmp_path, strategy, loop=LOCKSTEP | {"streamer": streamer}, max_steps=4)
    sizes = [sum(map(len, prepared)) for prepared in (ran[1].objective.prepared, other["prepared"])]
    assert sum(sizes) == sum(map(len, alone[1].objective.prepared)) == 12
    assert min(sizes) > 0
    assert sizes[0] != sizes[1], "the split is even, which is not the case that is meant"
    assert ran[1].objective.normalizer.mean == pytest.approx(alone[1].objective.normalizer.mean, rel=1e-6)
    assert ran[1].objective.normalizer.mean != 0.0


def test_a_rank_without_any_trajectory_takes_part(tmp_path: Path) -> None:
    """One fragment per update is for rank 0."""
    _, other, _ = compare(tmp_path, STRATEGIES[0], envs=ToyEnvs(num_envs=1, max_episode_steps=6))
    assert other["prepared"] == []


@pytest.mark.parametrize("streamer", [False, True])
def test_groups_go_whole_to_one_rank(streamer: bool, tmp_path: Path) -> None:
    """And the reference policy is the first one on both, whichever sees data first."""
    envs = HeldEnvs(num_envs=6, lucky=True, max_episode_steps=9)
    policy = {"objective": RecordingGRPO(group_size=2, kl_coef=0.1)}
    ran, other, _ = compare(tmp_path, STRATEGIES[0], envs=envs, policy=policy, loop=LOCKSTEP | {"streamer": streamer})
    here, there = ([group for ids in rank for group in ids] for rank in (ran[1].objective.prepared, other["prepared"]))
    assert not set(here) & set(there)
    assert len(here) + len(there) == 18
    assert all(ids.count(group) == 2 for ids in (here, there) for group in ids)


def test_sharded_ranks_hold_on_to_a_reference_policy_too(tmp_path: Path) -> None:
    policy = {"objective": RecordingGRPO(group_size=2, kl_coef=0.1)}
    compare(tmp_path, STRATEGIES[1], envs=HeldEnvs(num_envs=4, lucky=True, max_episode_steps=9), policy=policy, max_steps=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mini_batches_are_those_of_all_ranks_together(strategy: str, tmp_path: Path) -> None:
    """Nine decisions in mini-batches of four are three steps per epoch, also for a rank that has three decisions."""
    loop = LOCKSTEP | {"mini_batch_size": 4, "streamer": True}
    (trainer, _, _), _ = run_on_two(Case(tmp_path, strategy, 2, loop=loop, max_steps=2))
    assert trainer.state.counters.optimizer_steps == 2 * 2 * 3


def test_all_ranks_have_enough_of_an_update_at_once(tmp_path: Path) -> None:
    """By the KL of all of them, whatever each has seen itself."""
    policy = {"objective": RecordingPPO(target_kl=1e-7), "lr": 0.1}
    (trainer, _, _), _ = run_on_two(Case(tmp_path, STRATEGIES[0], 2, loop=LOCKSTEP | {"update_epochs": 6}, policy=policy))
    assert 3 < trainer.state.counters.optimizer_steps < 3 * 6


def test_rollouts_go_on_while_two_ranks_train(tmp_path: Path) -> None:
    """The usual setting: nothing in turn, and all counters add up. Both ranks are in the timeline, which rank 0 writes."""
    ran, _ = run_on_two(Case(tmp_path, STRATEGIES[0], 2, loop={"max_staleness": 2}, max_steps=6, timeline=True))
    last = ran[2][6]
    assert last["queue/consumed"] == 18.0
    assert last["queue/produced"] == 18.0 + last["queue/in_flight"]
    assert max(metrics["staleness/max"] for metrics in ran[2].values()) <= 2.0
    path = ran[0].run.path / "timeline.json"
    events, slices = check_trace(path), read_timeline(path)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    takers = [lanes[event["tid"]] for event in events if event["ph"] == "f"]
    assert len(takers) == 18
    assert set(takers) == {"trainer rank 0", "trainer rank 1"}
    for rank in set(takers):
        steps = [slice.args["step"] for slice in slices if slice.lane == rank and "step" in slice.args]
        assert steps == [*range(1, 7)]
        assert {"wait for other ranks", "forward and backward"} <= {slice.name for slice in slices if slice.lane == rank}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_resumed_on_any_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    """The checkpoint, written by rank 0 alone, holds all of the weights and of the optimizer's state."""
    (cut, _, _), _ = run_on_two(Case(tmp_path / "cut", strategy, 2, max_steps=2))
    last = cut.run.checkpoints / "last.ckpt"
    assert len(read_checkpoint(last)["optimizer"]["state"]) > 0
    ran, _, _ = compare(tmp_path, strategy, max_steps=4, ckpt_path=str(last))
    assert ran[0].state.counters.step == 4
    assert sorted(ran[2]) == [3, 4]


def test_ranks_share_out_the_batches_of_imitation(tmp_path: Path) -> None:
    envs = ClockEnvs(num_envs=1, chunk_size=2, success_at=3)
    CollectLoop(Steady(0.5), num_episodes=3, directory=tmp_path / "set").run(envs, seed=0)
    options: dict[str, Any] = {"envs": envs, "demonstrations": tmp_path / "set", "policy": {"objective": None}}
    cases = [Case(tmp_path / "two", STRATEGIES[1], 2, **options), Case(tmp_path / "one", **options)]
    with rank_1(cases[0]):
        _, policy, metrics = cases[0].run()
    _, alone, expected = cases[1].run()
    assert difference(policy.state_dict(), alone.state_dict()) < 1e-5
    assert metrics[6]["sft/squared_error"] == pytest.approx(expected[6]["sft/squared_error"], rel=1e-5)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "ddp"}, r"trainer.strategy='ddp': choose auto, size_weighted_ddp or size_weighted_fsdp"),
        ({"num_ranks": 0}, r"trainer.num_ranks=0 must be at least 1"),
        ({"num_ranks": 2}, r"trainer.strategy='auto' is one device, but trainer.num_ranks=2; set trainer.strategy"),
        ({"strategy": "size_weighted_ddp"}, r"'size_weighted_ddp' is for several ranks, but trainer.num_ranks=1; raise it"),
        ({"rank_timeout_s": 0.0}, r"trainer.rank_timeout_s=0.0 must be positive"),
        ({"rank_timeout_s": float("inf")}, r"trainer.rank_timeout_s=inf must be positive and finite"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **settings)


def test_loops_that_cannot_use_several_ranks_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "size_weighted_ddp", "num_ranks": 2}
    trainer = make_trainer(tmp_path, fit_loop=SyncFitLoop(), **options)
    with pytest.raises(ValueError, match=r"trainer.num_ranks=2, but SyncFitLoop trains on one rank; take StreamingFitLoop"):
        trainer.fit(tiny(), ToyEnvs())
    envs = ClockEnvs(num_envs=1, chunk_size=2, success_at=3)
    CollectLoop(Steady(0.5), num_episodes=1, directory=tmp_path / "set").run(envs, seed=0)
    trainer = make_trainer(tmp_path, sft_loop=SFTLoop(tmp_path / "set", batch_size=1), **options)
    with pytest.raises(ValueError, match=r"sft_loop.batch_size=1 leaves some of trainer.num_ranks=2 ranks without data"):
        trainer.sft(tiny(), envs)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, r"started 4 ranks, but trainer.num_ranks=2; make them the same"),
        ({"LOCAL_RANK": "0"}, r"has trained on several ranks before.*a script of its own"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    environment: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(tmp_path, fit_loop=StreamingFitLoop(), strategy="size_weighted_ddp", num_ranks=2)
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(tiny(objective=PPO()), ToyEnvs())


def test_what_rank_0_does_alone_no_other_rank_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a launcher starts ranks that the trainer was not told of."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match=r"this is rank 1, but only fit and sft .* \(here trainer.num_ranks=2\)"):
        make_trainer(tmp_path, strategy="size_weighted_ddp", num_ranks=2).validate(tiny(), ToyEnvs())
    with pytest.raises(RuntimeError, match=r"\(here trainer.num_ranks=1\)"):
        make_trainer(tmp_path).fit(tiny(), ToyEnvs())
    assert not os.listdir(tmp_path)
