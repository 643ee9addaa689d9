"""LockstepCollector: what it writes into a batch, its random streams, and its way back into the middle of an episode."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from tests.fakes import ClockEnvs, KnownPolicy, equal, known_value
from vla_async import keys
from vla_async.collectors.lockstep import LockstepCollector
from vla_async.collectors.pool import EnvPool
from vla_async.envs import EnvFactory, ToyEnvs
from vla_async.objectives import gae
from vla_async.policies import VLAPolicy
from vla_async.rng import TRAIN_SEEDS, episode_seed

OUTCOMES = ["terminated", "truncated", "done", "success", "success_once", "executed", "step_rewards", "reward"]


def collector(pool: EnvPool, policy: VLAPolicy | None = None, decisions: int = 6, seed: int = 3) -> LockstepCollector:
    policy = KnownPolicy() if policy is None else policy
    policy.build(pool.spec)
    return LockstepCollector(pool, policy, decisions_per_env=decisions, seed=seed)


def roll_out(factory: EnvFactory, decisions: int = 6, rollouts: int = 1, **options: Any) -> list[dict[Any, Tensor]]:
    with EnvPool(factory) as pool:
        rolling = collector(pool, decisions=decisions, **options)
        return [plain(rolling.collect(policy_version=version)) for version in range(rollouts)]


def plain(batch: TensorDictBase) -> dict[Any, Tensor]:
    return {key: value.clone() for key, value in batch.items(include_nested=True, leaves_only=True)}


def token(instruction: str) -> float:
    return float(KnownPolicy().tokenize(instruction))


def test_same_seed_same_data_whether_in_processes_or_in_one_batch() -> None:
    """Without this no result can be reproduced."""
    options: dict[str, Any] = {"num_envs": 3, "success_at": 3, "success_every": 2, "wordy": True}
    first, again = roll_out(ClockEnvs(**options), rollouts=2), roll_out(ClockEnvs(**options), rollouts=2)
    batched = roll_out(ClockEnvs(**options, batched=True), rollouts=2)
    assert equal(first, again)
    assert equal(first, batched)
    assert not equal(first, roll_out(ClockEnvs(**options), rollouts=2, seed=4))


def test_toy_data_repeats_too() -> None:
    """The same for envs whose targets are random."""
    factory = ToyEnvs(num_envs=2, chunk_size=3, max_episode_steps=7)
    with EnvPool(factory) as left, EnvPool(factory) as right:
        batches = []
        for pool in (left, right):
            policy = KnownPolicy()
            policy.build(pool.spec)
            batches.append(plain(LockstepCollector(pool, policy, decisions_per_env=5, seed=1).collect(0)))
    assert equal(*batches)


def test_every_env_and_decision_has_a_stream_of_its_own() -> None:
    """Envs that share noise or seeds collect the same data several times over."""
    (batch,) = roll_out(ClockEnvs(num_envs=4), decisions=8)
    chunks = batch[keys.CHUNK].reshape(32, -1)
    assert len(torch.unique(chunks, dim=0)) == 32
    assert len(torch.unique(batch[keys.REQUEST_KEY])) == 32
    assert len(torch.unique(batch[keys.STATE][..., 0])) == 12, "3 episodes of 5 env steps in each of 4 envs"


def test_episode_seeds_are_those_of_the_env_and_its_count() -> None:
    """Seeds outside the training range, or used twice, would leak evaluation episodes into training."""
    with EnvPool(ClockEnvs(max_episode_steps=2)) as pool:
        rolling = collector(pool, decisions=4)
        rolling.collect(0)
        finished = rolling.take_finished()
    seeds = [episode.seed for episode in finished]
    assert seeds == [episode_seed(3, env, episode) for episode in range(4) for env in range(2)]
    assert max(seeds) < TRAIN_SEEDS


def test_shapes_and_keys_are_those_of_the_schema() -> None:
    """Whatever consumes a batch relies on vla_async.keys alone."""
    (batch,) = roll_out(ClockEnvs(num_envs=2, image=True), decisions=3)
    assert batch[keys.IMAGE].shape == (2, 3, 3, 4, 4)
    assert batch[keys.CHUNK].shape == batch[keys.LOG_PROB].shape == (2, 3, 2, 2)
    assert batch[keys.EXECUTED].shape == batch[keys.STEP_REWARDS].shape == (2, 3, 2)
    singles = [keys.VALUE, keys.NEXT_VALUE, keys.REWARD, keys.DONE, keys.TERMINATED, keys.TRUNCATED]
    singles += [keys.SUCCESS, keys.SUCCESS_ONCE, keys.POLICY_VERSION, keys.REQUEST_KEY]
    assert all(batch[key].shape == (2, 3, 1) for key in singles)
    assert batch[keys.INSTRUCTION_TOKENS].shape == (2, 3, 1)


def test_policy_version_is_stamped_on_every_decision() -> None:
    """Staleness is measured by it."""
    batches = roll_out(ClockEnvs(), rollouts=3)
    assert [torch.unique(batch[keys.POLICY_VERSION]).tolist() for batch in batches] == [[0], [1], [2]]


def expected_next_values(batch: dict[Any, Tensor], following: dict[Any, Tensor]) -> Tensor:
    """V of what each chunk really led to, worked out from the seeds, the clock and the words alone."""
    value = torch.full_like(batch[keys.NEXT_VALUE], float("nan"))
    num, length = value.shape[:2]
    for env in range(num):
        for step in range(length):
            state, tokens = batch[keys.STATE][env, step], batch[keys.INSTRUCTION_TOKENS][env, step]
            if batch[keys.TERMINATED][env, step]:
                value[env, step] = 0.0
            elif batch[keys.TRUNCATED][env, step] or step + 1 < length:
                ran = batch[keys.EXECUTED][env, step].sum()
                after = torch.stack([state[0], state[1] + ran])
                value[env, step] = known_value(after, tokens)
            else:
                value[env, step] = known_value(following[keys.STATE][env, 0], following[keys.INSTRUCTION_TOKENS][env, 0])
    return value


@pytest.mark.parametrize("batched", [False, True], ids=["processes", "batch"])
def test_next_value_is_of_the_state_that_the_chunk_led_to(batched: bool) -> None:
    """At a truncation the value of the next episode's start would teach the critic nonsense, and silently."""
    factory = ClockEnvs(num_envs=3, wordy=True, success_at=4, success_every=2, batched=batched)
    batches = roll_out(factory, decisions=5, rollouts=3)
    seen = {"terminated": 0, "truncated": 0, "fragment": 0}
    for batch, following in itertools.pairwise(batches):
        expected = expected_next_values(batch, following)
        bootstrapped = ~batch[keys.TERMINATED]
        assert torch.equal(batch[keys.NEXT_VALUE][bootstrapped], expected[bootstrapped])
        seen["terminated"] += int(batch[keys.TERMINATED].sum())
        seen["truncated"] += int(batch[keys.TRUNCATED].sum())
        seen["fragment"] += int((~batch[keys.DONE][:, -1]).sum())
    assert min(seen.values()) > 0, f"the case is not a test of everything: {seen}"


def test_the_end_of_an_episode_is_valued_under_its_own_instruction() -> None:
    """The reset inside a step puts the next episode's words into the pool; they are not those of the final observation."""
    (batch,) = roll_out(ClockEnvs(num_envs=1, max_episode_steps=2, wordy=True), decisions=2)
    state = batch[keys.STATE][0, 0]
    own = token(f"start from {episode_seed(3, 0, 0)}")
    assert batch[keys.INSTRUCTION_TOKENS][0, 0].item() == own
    assert bool(batch[keys.TRUNCATED][0, 0])
    expected = known_value(torch.stack([state[0], state[1] + 2]), torch.tensor([own]))
    assert batch[keys.NEXT_VALUE][0, 0].item() == expected.item()
    assert batch[keys.INSTRUCTION_TOKENS][0, 1].item() == token(f"start from {episode_seed(3, 0, 1)}")


def test_episodes_are_counted_right_over_rollout_boundaries() -> None:
    """An episode that spans two rollouts must count once, with all of its rewards."""
    with EnvPool(ClockEnvs(num_envs=2, max_episode_steps=7, success_at=5, success_every=2)) as pool:
        rolling = collector(pool, decisions=3)
        per_rollout, batches = [], []
        for version in range(6):
            batches.append(rolling.collect(version))
            per_rollout.append(rolling.take_finished())
    batch = torch.cat(batches, dim=1)
    episodes = [episode for finished in per_rollout for episode in finished]
    expected = []
    for env in range(2):
        start = 0
        for step in range(18):
            if batch[keys.DONE][env, step]:
                part = batch[env, start : step + 1]
                expected.append((float(part[keys.STEP_REWARDS].double().sum()), int(part[keys.EXECUTED].sum())))
                start = step + 1
    counted = sorted((episode.episode_return, episode.env_steps) for episode in episodes)
    assert counted == [(pytest.approx(total), length) for total, length in sorted(expected)]
    assert {episode.env_steps for episode in episodes} == {5, 7}
    for episode in episodes:
        assert episode.success_once == episode.success_at_end == (episode.seed % 2 == 0) == (episode.env_steps == 5)
        assert episode.task == "clock"
    starts = [batch[keys.STATE][:, 3 * rollout, 1].max() for rollout in range(1, 6)]
    assert max(starts) > 0, "every rollout began with new episodes: the boundary is not tested"


def test_an_action_that_is_not_finite_is_refused_with_its_cause() -> None:
    """NaN in a simulator crashes it later and elsewhere; the message must say where it came from."""
    with EnvPool(ClockEnvs(num_envs=2, wordy=True)) as pool:
        rolling = collector(pool, KnownPolicy(nan_at=2))
        with pytest.raises(FloatingPointError) as caught:
            rolling.collect(0)
        words = pool.instructions[0]
    message = str(caught.value)
    assert "env 0 ('clock'" in message
    assert repr(words) in message
    assert "observation was finite: {'state': True}" in message


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint does it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("batched", [False, True], ids=["processes", "batch"])
def test_a_restored_collector_goes_on_bit_for_bit(batched: bool) -> None:
    """In fresh processes, with every env somewhere else in its episode."""
    factory = ClockEnvs(num_envs=3, max_episode_steps=7, wordy=True, success_at=5, success_every=2, batched=batched)
    with EnvPool(factory) as pool:
        rolling = collector(pool, decisions=5)
        rolling.collect(0)
        rolling.take_finished()
        state = saved(rolling.state_dict())
        expected, ended = plain(rolling.collect(1)), rolling.take_finished()
        expected_state = rolling.state_dict()
    assert len({len(history) for history in state["history"]}) > 1, "all envs are equally far: the case is too easy"
    with EnvPool(factory) as pool:
        resumed = collector(pool, decisions=5)
        resumed.load_state_dict(state)
        assert equal(saved(resumed.state_dict()), state)
        assert equal(plain(resumed.collect(1)), expected)
        assert resumed.take_finished() == ended
        assert equal(resumed.state_dict(), expected_state)


def test_a_state_of_other_envs_is_refused() -> None:
    """Running episodes cannot be dealt out to another number of envs."""
    with EnvPool(ClockEnvs(num_envs=2)) as pool:
        state = collector(pool).state_dict()
    refusal = pytest.raises(ValueError, match=r"2 running episodes, but env.num_envs=1; resume with the same number")
    with EnvPool(ClockEnvs(num_envs=1)) as pool, refusal:
        collector(pool).load_state_dict(state)


def test_a_replay_that_ends_early_is_refused() -> None:
    """Settings that changed since the checkpoint would put the envs somewhere else than where they were."""
    with EnvPool(ClockEnvs(max_episode_steps=9)) as pool:
        rolling = collector(pool, decisions=3)
        rolling.collect(0)
        state = rolling.state_dict()
    refusal = pytest.raises(RuntimeError, match="env 0 ended its episode while it was replayed: its settings have changed")
    with EnvPool(ClockEnvs(max_episode_steps=4)) as pool, refusal:
        collector(pool).load_state_dict(state)


def gae_by_hand(rows: list[dict[str, float]], gamma: float, lam: float) -> list[float]:
    """GAE of one env's decisions, one TD error after the other, without any vector arithmetic."""
    advantages, carried = [], 0.0
    for row in reversed(rows):
        bootstrap = 0.0 if row["terminated"] else row["next_value"]
        delta = row["reward"] + gamma * bootstrap - row["value"]
        carried = delta + (0.0 if row["done"] else gamma * lam * carried)
        advantages.append(carried)
    return advantages[::-1]


def test_gae_of_collected_data_equals_a_computation_by_hand() -> None:
    """From the raw rewards of the env steps to the advantage, over ends, truncations and fragments."""
    factory = ClockEnvs(num_envs=3, wordy=True, success_at=4, success_every=2)
    with EnvPool(factory) as pool:
        rolling = collector(pool, decisions=7)
        batch, after = rolling.collect(0), rolling.collect(1)
    gae(batch, gamma=0.9, gae_lambda=0.8)
    nexts = expected_next_values(plain(batch), plain(after))
    for env in range(3):
        rows = []
        for step in range(7):
            at = batch[env, step]
            rewards = [float(r) for r, ran in zip(at[keys.STEP_REWARDS], at[keys.EXECUTED], strict=True) if ran]
            value = float(known_value(at[keys.STATE], at[keys.INSTRUCTION_TOKENS]))
            rows.append({"reward": sum(rewards), "value": value, "next_value": float(nexts[env, step])})
            rows[-1] |= {"done": float(at[keys.DONE]), "terminated": float(at[keys.TERMINATED])}
        expected = gae_by_hand(rows, 0.9, 0.8)
        assert batch[keys.ADVANTAGE][env, :, 0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-2)
        targets = [advantage + row["value"] for advantage, row in zip(expected, rows, strict=True)]
        assert batch[keys.VALUE_TARGET][env, :, 0].tolist() == pytest.approx(targets, rel=1e-5, abs=1e-2)


def test_a_policy_without_a_critic_gives_no_values() -> None:
    """Objectives without a critic (GRPO) must not pay for one."""

    class Criticless(KnownPolicy):
        def act(self, td: TensorDictBase) -> TensorDictBase:
            out: TensorDictBase = super().act(td).exclude(keys.VALUE)
            return out

    with EnvPool(ClockEnvs()) as pool:
        batch = plain(collector(pool, Criticless()).collect(0))
    assert keys.VALUE not in batch
    assert keys.NEXT_VALUE not in batch
    assert batch[keys.DONE].any()


def test_outcomes_stay_as_they_were_when_the_rows_are_written_again() -> None:
    """The rows are shared memory that the next step overwrites; a view into them would change under the trainer."""
    with EnvPool(ClockEnvs()) as pool:
        rolling = collector(pool)
        batch = rolling.collect(0)
        before = plain(batch)
        rolling.collect(1)
        assert equal(plain(batch), before)
    assert all(("next", name) in before for name in OUTCOMES)
