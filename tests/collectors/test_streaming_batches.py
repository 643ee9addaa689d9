"""What a batch is: fragments of one env each, in TorchRL's layout, that replay exactly from their seeds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.objectives.value import GAE

from tests.collectors.rollout_fakes import BatchedCounterEnv, CounterEnv, Pusher, collecting, episodes, take
from tests.fakes import ClockEnvs, ClockSimulator, KnownPolicy, known_value
from vla_async import keys
from vla_async.collectors.pool import WorkerError

GAMMA = 0.9
CLOCKS = ClockEnvs(num_envs=3, chunk_size=2, max_episode_steps=5, success_at=3, success_every=2, names=("watch", "wind"))
"""Episodes of two decisions that succeed inside the second chunk (even seeds), and of three that are truncated."""


@pytest.fixture(scope="module")
def clocks() -> list[TensorDictBase]:
    """Batches of three envs; those that hold whole episodes hold several, of different length."""
    with collecting(CLOCKS, KnownPolicy(), frames_per_batch=36, seed=3) as collector:
        return take(collector, 4)


def value_of_next(batch: TensorDictBase) -> torch.Tensor:
    return known_value(batch["next", "observation", "state"], batch[keys.INSTRUCTION_TOKENS])


def row_of(batch: TensorDictBase) -> torch.Tensor:
    return batch["collector", "traj_ids"] % CLOCKS.num_envs


def test_a_row_is_one_env_and_its_episodes_are_whole_and_in_order(clocks: list[TensorDictBase]) -> None:
    for batch in clocks:
        assert batch.shape == (3, 12)
        assert batch.names == [None, "time"]
        assert all(len(row.unique()) == 1 for row in row_of(batch))
        ids, done = batch["collector", "traj_ids"], batch[keys.DONE].squeeze(-1)
        assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1]), "an id changes where an episode ends, and only there"
    for number, episode in episodes(clocks).items():
        begun, steps = episode[keys.STATE][:, 1], episode[keys.EXECUTED].sum(-1)
        assert torch.equal(begun, torch.cumsum(steps, 0) - steps), f"trajectory {number} has a hole"
        assert len(episode["collector", "seed"].unique()) == 1, f"trajectory {number} is two episodes"
        assert not bool(episode[keys.DONE][:-1].any())
    seeds = [int(episode["collector", "seed"][0]) for episode in episodes(clocks).values()]
    assert len(set(seeds)) == len(seeds), "an episode was repeated"


def test_next_is_what_followed_and_an_end_keeps_its_own_last_sight(clocks: list[TensorDictBase]) -> None:
    for batch in clocks:
        goes_on = ~batch[keys.DONE][:, :-1].squeeze(-1)
        for key in (keys.STATE, "success", "success_once", "executed", "step_rewards"):
            path = (key,) if isinstance(key, str) else key
            following, then = batch[("next", *path)][:, :-1], batch[path][:, 1:]
            assert torch.equal(following[goes_on], then[goes_on]), key
        done = batch[keys.DONE].squeeze(-1)
        assert bool(done.any())
        ended = batch["next", "observation", "state"][done]
        assert bool(((ended[:, 1] == 5) | (ended[:, 1] == 3)).all()), "the last sight of an episode is from before the reset"
        started = batch[keys.STATE][:, 1:][done[:, :-1]]
        assert bool((started[:, 1] == 0).all())
        assert not any(bool(batch[key].any()) for key in ("done", "terminated", "truncated")), "no end is decided on"
        seeds = batch["collector", "seed"]
        assert torch.equal(batch[keys.STATE][..., :1], (seeds % 997).float())


def test_every_episode_replays_from_its_seed(clocks: list[TensorDictBase]) -> None:
    """Another env of the same kind, in this process, does exactly what the batch says."""
    envs = [CLOCKS.make(index) for index in range(CLOCKS.num_envs)]
    for number, episode in episodes(clocks).items():
        env = envs[number % CLOCKS.num_envs]
        state = env.reset_rows(torch.tensor([True]), episode["collector", "seed"][0])["state"][0]
        for decision in episode:
            assert torch.equal(decision[keys.STATE], state)
            assert decision[keys.INSTRUCTION] == env.simulator.instructions[0]
            result = env.step_chunk(decision[keys.CHUNK].unsqueeze(0))
            state = result.observation["state"][0]
            assert torch.equal(decision["next", "observation", "state"], state)
            assert torch.equal(decision[keys.STEP_REWARDS], result.step_rewards[0])
            assert torch.equal(decision[keys.EXECUTED], result.executed[0])
            assert bool(decision[keys.SUCCESS]) == bool(result.success[0])
            assert bool(decision[keys.TERMINATED]) == bool(result.terminated[0])
            assert bool(decision[keys.TRUNCATED]) == bool(result.truncated[0])


def test_a_success_inside_a_chunk_is_rewarded_and_ends_it(clocks: list[TensorDictBase]) -> None:
    """The third env step of chunks of two: what a chunk does after its first env step must not get lost."""
    won = torch.cat([batch[batch[keys.SUCCESS].squeeze(-1)] for batch in clocks])
    assert len(won) > 0
    assert won[keys.EXECUTED].tolist() == [[True, False]] * len(won)
    assert bool(won[keys.TERMINATED].all())
    assert torch.equal(won[keys.REWARD].squeeze(-1), won[keys.STEP_REWARDS][:, 0])
    assert bool((won[keys.REWARD] != 0).all())


def test_gae_on_a_batch_is_the_return_of_each_env(clocks: list[TensorDictBase]) -> None:
    """With λ = 1 the target is the discounted return, plus the value of where an episode was cut, added up by hand here."""
    gae = GAE(gamma=GAMMA, lmbda=1.0, value_network=None, average_gae=False)
    for batch in clocks:
        targets = gae(batch.clone())[keys.VALUE_TARGET].squeeze(-1)
        for row, target in zip(batch, targets, strict=True):
            following = float(value_of_next(row[-1]))
            for step in reversed(range(len(row))):
                decision = row[step]
                if bool(decision[keys.TERMINATED]):
                    following = 0.0
                elif bool(decision[keys.TRUNCATED]):
                    following = float(value_of_next(decision))
                following = float(decision[keys.REWARD]) + GAMMA * following
                assert float(target[step]) == pytest.approx(following, abs=1e-3)  # of thousands


def test_the_value_of_an_end_is_that_of_its_own_sight(clocks: list[TensorDictBase]) -> None:
    for batch in clocks:
        wanted = torch.where(batch[keys.TERMINATED], 0.0, value_of_next(batch))
        torch.testing.assert_close(batch[keys.NEXT_VALUE], wanted, rtol=0, atol=0)
        torch.testing.assert_close(batch[keys.VALUE], known_value(batch[keys.STATE], batch[keys.INSTRUCTION_TOKENS]))


@pytest.mark.parametrize("stages", [1, 2])
def test_rows_of_a_batched_simulator_end_at_different_times(stages: int) -> None:
    """Its rows are fragments like any other, and each goes on with an episode of its own when its old one ends."""
    envs = ClockEnvs(num_envs=4, chunk_size=2, max_episode_steps=7, success_at=3, success_every=2, batched=True)
    with collecting(envs, KnownPolicy(), frames_per_batch=32, num_stages=stages, seed=1) as collector:
        batches = take(collector, 3)
        assert collector.stats()["batch_size/histogram"][4 // stages] > 0, "the rows of a stage are decided on together"
        assert len(collector.stats()["env_steps/per_worker"]) == 1
    lengths = set[int]()
    for number, episode in episodes(batches).items():
        begun, steps = episode[keys.STATE][:, 1], episode[keys.EXECUTED].sum(-1)
        assert torch.equal(begun, torch.cumsum(steps, 0) - steps), f"trajectory {number} has a hole"
        assert len(episode["collector", "seed"].unique()) == 1
        if bool(episode[keys.DONE][-1]):
            lengths.add(len(episode))
    assert lengths == {2, 4}


@pytest.mark.parametrize("stages", [1, 3, 6])
def test_each_stage_runs_the_tasks_of_its_own_envs(stages: int) -> None:
    """A stage may have fewer rows than there are tasks: together they run what the whole simulator would."""
    envs = ClockEnvs(num_envs=6, names=("a", "b", "c", "d"), batched=True)
    with collecting(envs, KnownPolicy(), frames_per_batch=24, num_stages=stages, seed=1) as collector:
        batches = take(collector, 2)
    tasks = {(number % 6, int(e[keys.STATE][0, 2])) for number, e in episodes(batches).items()}
    assert tasks == {(row, row % 4) for row in range(6)}


class Forgetful(ClockEnvs):
    """Does not look at which envs a stage is."""

    def make_simulator(self, index: int, render: bool = False) -> ClockSimulator:
        return super().make_simulator(0, render)


def test_a_stage_that_runs_other_tasks_than_its_envs_is_refused() -> None:
    envs = Forgetful(num_envs=4, names=("a", "b", "c"), batched=True)
    with collecting(envs, KnownPolicy(), frames_per_batch=8) as collector:
        take(collector, 1)
    what = r"(?s)begins with env 2 runs \['a', 'b'\].*are \['c', 'a'\].*Forgetful.make_simulator.*set num_stages=1"
    with (
        pytest.raises(WorkerError, match=what),
        collecting(envs, KnownPolicy(), frames_per_batch=8, num_stages=2) as collector,
    ):
        take(collector, 1)


def test_rows_of_any_batched_env_end_at_different_times() -> None:
    with collecting(BatchedCounterEnv, None, frames_per_batch=30) as collector:
        batches = take(collector, 3)
    for number, episode in episodes(batches).items():
        row = number % 3
        assert episode["observation"][:, 0].unique().tolist() == [row]
        assert episode["observation"][:, 1].tolist() == list(range(len(episode)))
        assert torch.equal(episode["next", "reward"].flatten(), episode["next", "observation"][:, 1])
        if bool(episode["next", "done"][-1]):
            assert len(episode) == row + 2


def test_frames_are_counted_and_rounded_up_to_whole_fragments() -> None:
    envs = [partial(CounterEnv, number) for number in range(3)]
    with collecting(envs, Pusher(), frames_per_batch=10, total_frames=30) as collector:
        with pytest.warns(UserWarning, match="each batch has 12"):
            sizes = [batch.numel() for batch in collector]
        assert sizes == [12, 12, 12], "it ends with the batch in which total_frames is reached"
        assert (collector.frames_per_batch, collector.requested_frames_per_batch) == (12, 10)
        assert (collector._frames, collector._iter) == (36, 2)
        assert len(collector) == 3
        assert list(collector) == []


def test_one_env_gives_batches_without_an_env_dimension() -> None:
    """As TorchRL's collector does for an env without a batch size."""
    with collecting(CounterEnv, Pusher(), frames_per_batch=6) as collector:
        batch = take(collector, 1)[0]
    assert batch.shape == (6,)
    assert batch.names == ["time"]


def test_postproc_and_hooks_see_each_batch() -> None:
    seen: list[object] = []
    with collecting(
        CounterEnv, Pusher(), frames_per_batch=6, postproc=lambda td: td.set("extra", td["action"])
    ) as collector:
        collector.pre_collect_hook = lambda: seen.append("before")
        collector.post_collect_hook = lambda td: seen.append(td.numel())
        assert all("extra" in batch.keys() for batch in take(collector, 2))
    assert seen == ["before", 6, "before", 6]
