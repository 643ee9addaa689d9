"""EvaluateLoop: exactly the asked-for episodes, whatever runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import pytest
import torch

from tests.fakes import ClockEnvs, KnownPolicy, equal, is_running, tiny
from vla_async.collectors.episodes import Episode
from vla_async.collectors.pool import WorkerError
from vla_async.envs import EnvFactory, ToyEnvs
from vla_async.loops import EvaluateLoop, EvaluationResult
from vla_async.policies import VLAPolicy
from vla_async.rng import TRAIN_SEEDS, Split, evaluation_seed

TASKS = ("a", "b", "c", "d", "e")


def evaluate(
    factory: EnvFactory,
    policy: VLAPolicy | None = None,
    split: Split = "validate",
    videos: Path | None = None,
    **options: Any,
) -> EvaluationResult:
    policy = KnownPolicy() if policy is None else policy
    loop = EvaluateLoop(**({"num_episodes": 5} | options))
    policy.build(loop.open(factory).spec)
    try:
        return loop.run(policy, factory, split, policy_version=7, videos=videos)
    finally:
        loop.close()


@pytest.mark.parametrize("split", ["validate", "test"])
def test_each_episode_is_played_once_on_its_held_out_seed(split: Split) -> None:
    """Episodes of training seeds, or some twice, would make the figure worthless."""
    result = evaluate(ClockEnvs(num_envs=3), split=split, num_episodes=7)
    assert [episode.seed for episode in result.episodes] == [evaluation_seed(split, number) for number in range(7)]
    assert min(episode.seed for episode in result.episodes) >= TRAIN_SEEDS
    assert (result.split, result.policy_version) == (split, 7)


def test_the_two_splits_share_no_seed() -> None:
    """What was validated on is no test."""
    seeds = [{evaluation_seed(split, number) for number in range(10_000)} for split in ("validate", "test")]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize("deterministic", [True, False], ids=["mode", "sampled"])
def test_the_result_does_not_depend_on_the_envs(deterministic: bool) -> None:
    """Neither on their number nor on where they run: a figure must not change with the machine."""
    options: dict[str, Any] = {"names": ("a", "b"), "success_at": 3, "success_every": 2, "wordy": True, "success_lasts": 1}
    played = [
        evaluate(ClockEnvs(num_envs=number, batched=batched, **options), deterministic=deterministic).episodes
        for number, batched in [(1, False), (2, False), (3, False), (4, True)]
    ]
    assert played[0] == played[1] == played[2] == played[3]
    assert len({episode.episode_return for episode in played[0]}) == (1 if deterministic else 10)


def test_a_real_policy_gives_the_same_with_any_number_of_envs() -> None:
    """A network's arithmetic may round differently in another batch size; the outcomes must agree all the same."""
    policy = tiny(objective=None)
    results = [evaluate(ToyEnvs(num_envs=number), policy, num_episodes=6).episodes for number in (1, 4)]
    for left, right in zip(*results, strict=True):
        assert (left.seed, left.success_once, left.env_steps) == (right.seed, right.success_once, right.env_steps)
        assert left.episode_return == pytest.approx(right.episode_return, abs=1e-4)


def test_sampling_differs_from_the_mode_and_repeats() -> None:
    """The setting must do something, and the noise must be the episode's own."""
    mode, sampled, again = (
        evaluate(ClockEnvs(), deterministic=deterministic).episodes for deterministic in (True, False, False)
    )
    assert sampled == again
    assert [episode.episode_return for episode in mode] != [episode.episode_return for episode in sampled]


def test_success_once_and_at_end_differ_where_success_can_be_lost() -> None:
    """An episode that ended at its success could not lose it, so evaluation runs to the horizon."""
    factory = ClockEnvs(success_at=3, success_lasts=2, success_every=2, max_episode_steps=5)
    result = evaluate(factory, num_episodes=4)
    assert [episode.success_once for episode in result.episodes] == [True, False, True, False]
    assert not any(episode.success_at_end for episode in result.episodes)
    assert {episode.env_steps for episode in result.episodes} == {5}
    metrics = result.metrics()
    assert metrics["validate/success_once"] == 0.5
    assert metrics["validate/success_at_end"] == 0.0
    own = evaluate(factory, num_episodes=4, on_success=None)
    assert [episode.success_at_end for episode in own.episodes] == [True, False, True, False]
    assert [episode.env_steps for episode in own.episodes] == [3, 5, 3, 5]


@pytest.mark.parametrize("num_envs", [1, 2, 5, 7])
def test_every_task_is_reported_however_few_envs_there_are(num_envs: int) -> None:
    """With fewer envs than tasks the tasks take turns; none may be left out."""
    factory = ClockEnvs(num_envs=3, names=TASKS, success_at=3, success_every=2)
    result = evaluate(factory, num_envs=num_envs, num_episodes=3, num_videos=0)
    played = [(episode.task, episode.seed) for episode in result.episodes]
    assert played == [(task, evaluation_seed("validate", number)) for task in TASKS for number in range(3)]
    assert result.tasks == list(TASKS)
    metrics = result.metrics()
    assert metrics["validate/episodes"] == 15
    for task in TASKS:
        assert metrics[f"validate/episodes/{task}"] == 3
        assert metrics[f"validate/success_once/{task}"] == pytest.approx(2 / 3)
        low, high = metrics[f"validate/success_once_low/{task}"], metrics[f"validate/success_once_high/{task}"]
        assert (low, high) == result.success("success_once", task).interval
    assert factory == ClockEnvs(num_envs=3, names=TASKS, success_at=3, success_every=2), "the training envs were touched"


def test_a_batch_too_small_for_the_tasks_is_refused() -> None:
    """It would silently leave tasks out: one simulator cannot take turns."""
    with pytest.raises(ValueError, match=r"2 envs in one batch cannot run 5 tasks; set evaluate_loop.num_envs to"):
        evaluate(ClockEnvs(num_envs=2, names=TASKS, batched=True))
    result = evaluate(ClockEnvs(num_envs=2, names=TASKS, batched=True), num_envs=6, num_episodes=2)
    assert [episode.task for episode in result.episodes] == [task for task in TASKS for _ in range(2)]


def length_of(path: Path) -> int:
    with imageio.get_reader(path) as reader:
        return sum(1 for _ in reader)


@pytest.mark.parametrize("batched", [False, True], ids=["processes", "batch"])
def test_videos_show_whole_episodes(tmp_path: Path, batched: bool) -> None:
    """One per recorded episode, a frame per env step, also where another env of the batch ends earlier."""
    factory = ClockEnvs(num_envs=3, success_at=2, success_every=2, max_episode_steps=5, batched=batched)
    result = evaluate(factory, num_episodes=5, num_videos=2, videos=tmp_path, on_success=None)
    names = [path.name for path in result.videos]
    base, played = evaluation_seed("validate", 0), [2, 5, 2, 5, 2]
    assert all(path.is_file() for path in result.videos)
    assert names[0] == f"validate_000007_clock_{base}_success.mp4"
    assert len(names) == 2
    lengths = [length_of(path) for path in result.videos]
    seeds = [int(name.split("_")[3]) for name in names]
    assert lengths == [played[seed - base] for seed in seeds]


def test_one_video_per_task(tmp_path: Path) -> None:
    """Of each task, in waves too."""
    result = evaluate(ClockEnvs(num_envs=2, names=("a", "b", "c/d")), num_episodes=2, videos=tmp_path)
    assert sorted(path.name.split("_")[2] for path in result.videos) == ["a", "b", "c-d"]
    assert [path.parent for path in result.videos] == [tmp_path] * 3


def test_envs_stay_open_between_runs_and_close_for_good() -> None:
    """Building a simulator before every validation would cost more than the validation."""
    policy, factory, loop = KnownPolicy(), ClockEnvs(), EvaluateLoop(num_episodes=2)
    pool = loop.open(factory)
    policy.build(pool.spec)
    loop.run(policy, factory, "validate")
    assert loop.open(ClockEnvs()) is pool, "an equal factory must not cost new envs"
    assert loop.open(ClockEnvs(max_episode_steps=6)) is not pool
    pids = [link.process.pid for link in loop._pool._links] if loop._pool else []
    assert len(pids) == 2
    loop.close()
    assert not any(pid is not None and is_running(pid) for pid in pids)
    loop.close()


def test_after_an_error_the_next_run_starts_afresh() -> None:
    """Envs left in the middle of an episode must not play the rest of it as the next evaluation."""
    factory, loop = ClockEnvs(), EvaluateLoop(num_episodes=2, deterministic=False)
    broken, sound = KnownPolicy(nan_at=2), KnownPolicy()
    broken.build(loop.open(factory).spec)
    sound.build(loop.open(factory).spec)
    broken.train()
    with pytest.raises(FloatingPointError, match="env 0"):
        loop.run(broken, factory, "validate")
    assert broken.training, "the mode must be put back"
    again = loop.run(sound, factory, "validate")
    loop.close()
    assert again.episodes == evaluate(factory, num_episodes=2, deterministic=False).episodes


def test_envs_that_were_cut_short_are_built_anew() -> None:
    """The same loop must be usable after Ctrl-C or a hang, in a notebook for example."""
    factory = ClockEnvs(num_envs=1, fault="hang-in-step", fault_step=3)
    loop, policy = EvaluateLoop(num_episodes=1, timeout_s=60.0), KnownPolicy()
    pool = loop.open(factory)
    policy.build(pool.spec)
    pool.timeout_s = 0.3
    with pytest.raises(WorkerError, match="no answer within"):
        loop.run(policy, factory, "validate")
    fresh = loop.open(factory)
    loop.close()
    assert fresh is not pool


def test_a_broken_env_is_an_error_not_a_failed_episode() -> None:
    """Success rates over the envs that did not crash are wrong."""
    with pytest.raises(WorkerError, match="env 1 broke in step"):
        evaluate(ClockEnvs(fault="raise-in-step", fault_env=1, fault_step=3))


def test_evaluation_leaves_the_policy_and_the_random_state_alone() -> None:
    """A run that validates and one that does not must train the same."""
    policy = tiny()
    loop = EvaluateLoop(num_episodes=2)
    policy.build(loop.open(ToyEnvs(num_envs=2)).spec)
    policy.train()
    before, generator = {name: value.clone() for name, value in policy.state_dict().items()}, torch.get_rng_state()
    loop.run(policy, ToyEnvs(num_envs=2), "validate")
    loop.close()
    assert equal(before, policy.state_dict())
    assert torch.equal(generator, torch.get_rng_state())
    assert policy.training
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_metrics_of_one_task_are_not_repeated_by_name() -> None:
    """And they say on which weights they were measured."""
    episodes = [Episode("a", 1, True, False, 2.0, 10), Episode("a", 2, True, True, 4.0, 20)]
    metrics = EvaluationResult("test", 3, episodes).metrics()
    assert metrics["test/success_once"] == 1.0
    assert metrics["test/success_at_end"] == 0.5
    assert (metrics["test/return"], metrics["test/episode_env_steps"]) == (3.0, 15.0)
    assert (metrics["test/policy_version"], metrics["test/episodes"]) == (3, 2)
    assert not any(name.endswith("/a") for name in metrics)


def test_metrics_of_several_tasks_are_told_for_each() -> None:
    """A mean over all tasks hides the one that is never solved."""
    episodes = [Episode("a", 1, True, True, 2.0, 10), Episode("b", 1, False, False, 0.5, 30)]
    metrics = EvaluationResult("test", 3, episodes).metrics()
    assert [metrics[f"test/success_once{of}"] for of in ("", "/a", "/b")] == [0.5, 1.0, 0.0]
    assert [metrics[f"test/return{of}"] for of in ("", "/a", "/b")] == [1.25, 2.0, 0.5]
    assert [metrics[f"test/episode_env_steps{of}"] for of in ("", "/a", "/b")] == [20.0, 10.0, 30.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_episodes": 0}, "evaluate_loop.num_episodes=0 must be at least 1"),
        ({"num_envs": 0}, "evaluate_loop.num_envs=0 must be at least 1, or null"),
        ({"num_videos": -1}, "evaluate_loop.num_videos=-1 must not be negative"),
        ({"timeout_s": 0.0}, "evaluate_loop.timeout_s=0.0 must be positive"),
        ({"timeout_s": float("nan")}, "evaluate_loop.timeout_s=nan must be positive"),
        ({"on_success": "stop"}, "evaluate_loop.on_success='stop': choose"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        EvaluateLoop(**options)
