"""A collector from its first batch to its end: seeds, state, breaks, restarts, and a replay buffer that fills meanwhile."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, episodes, take
from tests.fakes import ClockEnvs, KnownPolicy, equal, is_running, wait_until
from vla_async import keys
from vla_async.collectors import StreamingCollector

COUNTERS = [partial(CounterEnv, number) for number in range(2)]


def first_episodes(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """The first two decisions of the first episode of each env."""
    found = episodes(batches)
    return {number % 2: found[number][:2] for number in sorted(found, reverse=True)}


def seeds(batches: list[TensorDictBase]) -> set[int]:
    return {int(seed) for batch in batches for seed in batch["collector", "seed"].unique()}


def processes(collector: StreamingCollector) -> list[int]:
    fleet = collector.fleet
    return [member.process.pid for member in [*fleet._workers, *fleet._replicas]]


def test_a_seed_fixes_all_random_streams_and_says_which_comes_next() -> None:
    with collecting(ClockEnvs(), KnownPolicy(), frames_per_batch=12, seed=5) as collector:
        first = first_episodes(take(collector, 2))
        assert collector.set_seed(6) == 7
        other = first_episodes(take(collector, 2))
        assert collector.set_seed(5, static_seed=True) == 5
        again = first_episodes(take(collector, 2))
    for row in range(2):
        for key in (keys.STATE, keys.CHUNK, keys.REQUEST_KEY, ("collector", "seed")):
            assert equal(first[row][key], again[row][key]), key
            assert not equal(first[row][key], other[row][key]), key


def test_a_state_is_told_while_it_runs_and_goes_on_with_fresh_episodes() -> None:
    """TorchRL's MultiAsyncCollector never returns from it in mid-iteration; its AsyncBatchedCollector tells nothing."""
    with collecting(ClockEnvs(), KnownPolicy(), frames_per_batch=12, total_frames=48, seed=2) as collector:
        before = []
        for batch in collector:
            before.append(batch)
            state = collector.state_dict()
            collector.update_policy_weights_()
            if len(before) == 2:
                break
    assert (state["frames"], state["iter"], state["policy_version"], state["seed"]) == (24, 1, 1, 2)
    with collecting(ClockEnvs(), KnownPolicy(), frames_per_batch=12, total_frames=48) as collector:
        collector.load_state_dict(state)
        after = list(collector)
        assert (collector._frames, collector._iter) == (48, 3)
    assert not seeds(before) & seeds(after), "an episode was repeated"
    assert before[0][keys.REQUEST_KEY].unique().tolist()[0] not in after[0][keys.REQUEST_KEY].unique().tolist()
    ids = [set(episodes(batches)) for batches in (before, after)]
    assert not ids[0] & ids[1], "the id of a trajectory was used again"
    assert all(int(batch[keys.POLICY_VERSION].min()) == 1 for batch in after)


def test_a_break_loses_nothing() -> None:
    """Iterating goes on where it was left, however it was left: also beside an iterator that still waits for its turn."""
    with collecting(COUNTERS, Pusher(), frames_per_batch=8, max_in_flight=1) as collector:
        batches = take(collector, 2)
        one, other = iter(collector), iter(collector)
        batches += [next(one), next(other), next(one)]
        gc.collect()
        batches += take(collector, 1)
        assert collector.next() is not None
    for number, episode in episodes(batches).items():
        assert episode["observation"][:, 2].tolist() == list(range(len(episode))), f"trajectory {number}"
    assert sum(batch.numel() for batch in batches) == 48


def test_shutdown_ends_all_processes_and_iterating_again_starts_new_ones() -> None:
    with collecting(ClockEnvs(), KnownPolicy(), frames_per_batch=12) as collector:
        collector.shutdown()  # harmless before anything has run
        before = take(collector, 2)
        old = processes(collector)
        assert all(map(is_running, old))
        collector.shutdown()
        assert collector.closed
        assert not any(map(is_running, old))
        collector.shutdown()
        after = take(collector, 1)
        assert not collector.closed
        new = processes(collector)
        collector.async_shutdown(timeout=1.0)
    assert not any(map(is_running, new))
    assert not seeds(before) & seeds(after), "an episode was repeated"


def test_reset_starts_new_episodes_and_forgets_the_halves_of_old_ones() -> None:
    options = {"frames_per_batch": 2, "fragment_length": 1, "trajs_per_batch": 2, "traj_format": "cat"}
    with collecting(COUNTERS, Pusher(), **options) as collector:
        batches = []
        for number, batch in enumerate(collector):
            batches.append(batch)
            if number == 3:
                break
            collector.reset()
    for episode in episodes(batches).values():
        assert episode["observation"][:, 2].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_forgotten_collector_leaves_no_process() -> None:
    collector = StreamingCollector(COUNTERS, Pusher(), frames_per_batch=8)
    take(collector, 1)
    old = processes(collector)
    del collector
    gc.collect()
    wait_until(lambda: not any(map(is_running, old)), "its processes end")


def replay(size: int = 400) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size))


def test_iterating_fills_a_replay_buffer_from_which_whole_slices_are_drawn() -> None:
    """Fragments of all envs lie one behind the other; a slice that ran from one into the next would be of two episodes."""
    sampler = SliceSampler(slice_len=3, traj_key=("collector", "traj_ids"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), sampler=sampler, batch_size=60)
    with collecting(COUNTERS, Pusher(), frames_per_batch=10, total_frames=60, replay_buffer=buffer) as collector:
        assert list(collector) == [None] * 6
        assert collector.getattr_rb("write_count") == 60
    assert len(buffer) == 60
    for seen in buffer.sample()["observation"].reshape(-1, 3, 3):
        assert len(seen[:, :2].unique(dim=0)) == 1, "of one episode of one env"
        assert seen[:, 2].diff().tolist() == [1.0, 1.0]


def test_a_replay_buffer_fills_in_the_background_until_it_is_told_to_stop() -> None:
    buffer = replay(100_000)
    with collecting(COUNTERS, Pusher(), frames_per_batch=8, replay_buffer=buffer) as collector:
        collector.start()
        with pytest.raises(RuntimeError, match="before"):
            collector.start()
        with pytest.raises(RuntimeError, match="background"):
            next(iter(collector.iterator()))
        wait_until(lambda: buffer.write_count >= 80, "it fills")
        collector.update_policy_weights_()
        with collector.pause():
            held, decisions = buffer.write_count, collector.stats()["decisions"]
            threading.Event().wait(0.2)
            assert buffer.write_count == held
            assert collector.stats()["decisions"] == decisions
        wait_until(lambda: buffer.write_count > held + 40, "it goes on after the pause")
        collector.set_seed(3)  # restarts the envs
        held = buffer.write_count
        wait_until(lambda: buffer.write_count > held + 40, "it goes on with another seed")
        state = collector.state_dict()
        collector.async_shutdown()
        held = buffer.write_count
    assert state["frames"] <= held == collector._frames
    assert set(buffer[:]["policy_version"].flatten().tolist()) == {0, 1}
    assert buffer.write_count == held


def test_shutdown_inside_a_pause_ends_it() -> None:
    """The thread that writes waits for the end of the pause, and the pause for the end of the shutdown."""
    buffer = replay(100_000)
    with collecting(COUNTERS, Pusher(), frames_per_batch=8, replay_buffer=buffer) as collector:
        for _ in range(3):
            collector.start()
            wait_until(lambda: collector._frames % 64 > 16, "it runs")
            with collector.pause():
                collector.shutdown()
            assert not [thread for thread in threading.enumerate() if thread.name == "vla-async-collector"]


def test_trajectories_in_a_replay_buffer_are_whole_however_often_the_weights_change() -> None:
    """What is under way ages by many versions at once, and is not for that reason cut out of its trajectory."""
    buffer = replay(100_000)
    envs = [partial(CounterEnv, number, horizon=7) for number in range(3)]
    with collecting(envs, Pusher(), frames_per_batch=9, replay_buffer=buffer, trajs_per_batch=2) as collector:
        collector.start()
        while buffer.write_count < 700:
            collector.update_policy_weights_()
        collector.async_shutdown()
    found = episodes([buffer[:]])
    assert len(found) >= 100
    for episode in found.values():
        assert episode["observation"][:, 2].tolist() == list(range(7))


def test_start_needs_a_replay_buffer() -> None:
    with collecting(COUNTERS, Pusher(), frames_per_batch=8) as collector, pytest.raises(RuntimeError, match="replay_buffer"):
        collector.start()


def test_what_fails_in_the_background_is_told_to_who_comes_next() -> None:
    """Else a learner would train for ever on what is there."""

    def spoil(batch: TensorDictBase) -> TensorDictBase:
        raise LookupError("nothing can be made of this batch")

    with collecting(COUNTERS, Pusher(), frames_per_batch=8, replay_buffer=replay(), postproc=spoil) as collector:
        for following in (collector.update_policy_weights_, collector.shutdown, lambda: next(collector.pause().gen)):
            collector.start()
            wait_until(lambda: collector._writer_error is not None, "it fails")
            with pytest.raises(RuntimeError, match="in the background") as failure:
                following()
            assert isinstance(failure.value.__cause__, LookupError)


def test_stats_tell_what_happens() -> None:
    with collecting(ClockEnvs(num_envs=3), KnownPolicy(), frames_per_batch=18) as collector:
        assert collector.stats()["frames"] == 0
        batches = take(collector, 4)
        stats = collector.stats()
    assert stats["frames"] == 72
    assert stats["batches"] == 4
    assert stats["env_steps"] == sum(stats["env_steps/per_worker"]) >= sum(int(b[keys.EXECUTED].sum()) for b in batches)
    assert stats["decisions"] >= 72
    assert sum(size * count for size, count in enumerate(stats["batch_size/histogram"])) == stats["decisions"]
    assert 0.0 <= stats["request_wait_s/p50"] <= stats["request_wait_s/p95"] <= stats["request_wait_s/p99"]
    assert 0.0 <= stats["replica/idle_share"] <= 1.0
    assert 0.0 <= stats["worker/idle_share"] <= 1.0
    assert len(stats["worker/busy_s"]) == 3
    assert torch.isfinite(torch.tensor([value for value in stats.values() if isinstance(value, float)])).all()
