"""``StreamingCollector`` where TorchRL expects one of its own: same layout, same trainer, same transforms and policies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type, step_mdp
from torchrl.modules import LSTMModule, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import ReplayBufferTrainer, Trainer, UpdateWeights

from tests.collectors.rollout_fakes import CounterEnv, Pusher, collecting, episodes, take
from tests.fakes import ClockEnvs, tiny
from vla_async import keys
from vla_async.envs import ToyEnvs

TOYS = ToyEnvs(num_envs=2, chunk_size=2, obs="rgb+state", image_size=8)


def transformed(number: int = 0, horizon: int = 4) -> EnvBase:
    return TransformedEnv(CounterEnv(number, horizon), Compose(InitTracker(), StepCounter(), RewardSum()))


def layout(batch: TensorDictBase, without: set[str]) -> dict[str, tuple[torch.Size, object]]:
    """Shape and type of every leaf, by its dotted name."""
    leaves = {".".join((key,) if isinstance(key, str) else key): batch.get(key) for key in batch.keys(True, True)}
    found = {name: (value.shape, getattr(value, "dtype", str)) for name, value in leaves.items()}
    return {name: what for name, what in found.items() if name not in without}


def test_the_layout_is_that_of_torchrl_for_any_env() -> None:
    policy = Pusher()
    stock = Collector(SerialEnv(2, transformed), policy, frames_per_batch=12, total_frames=-1)
    wanted = next(iter(stock))
    stock.shutdown()
    with collecting([transformed] * 2, policy, frames_per_batch=12) as collector:
        batch = take(collector, 1)[0]
    assert layout(batch, {"policy_version"}) == layout(wanted, set())
    assert batch.names == wanted.names
    assert (batch.batch_size, batch.device) == (wanted.batch_size, wanted.device)
    for key in ("step_count", "is_init", "episode_reward"):
        ours, theirs = batch[0], wanted[0]
        assert torch.equal(ours[key], theirs[key]), key
        if key != "is_init":
            assert torch.equal(ours["next", key], theirs["next", key]), f"next {key}"


def test_the_layout_is_that_of_torchrl_for_our_own_envs() -> None:
    policy = tiny()
    policy.build(TOYS.make(0).env_spec)
    stock = Collector(
        SerialEnv(2, [partial(TOYS.make, index) for index in range(2)]), policy, frames_per_batch=8, total_frames=-1
    )
    wanted = next(iter(stock))
    stock.shutdown()
    with collecting(TOYS, policy, frames_per_batch=8) as collector:
        batch = take(collector, 1)[0]
    own = {name for name in layout(batch, set()) if name.startswith("collector.") and name != "collector.traj_ids"}
    own |= {"policy_version", "request_key", "next.state_value"}
    assert layout(batch, own) == layout(wanted, set())
    assert batch.names == wanted.names


def test_text_observations_come_through() -> None:
    with collecting(partial(CounterEnv, texts=True, horizon=3), Pusher(), frames_per_batch=9) as collector:
        batch = take(collector, 1)[0]
    assert batch["caption"] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2", "2/0", "2/1", "2/2"]
    assert batch["next", "caption"] == ["0/1", "0/2", "0/3", "1/1", "1/2", "1/3", "2/1", "2/2", "2/3"]


def test_too_long_a_text_ends_the_run_with_the_setting_to_raise() -> None:
    envs = partial(CounterEnv, texts=True)
    with (
        collecting(envs, Pusher(), frames_per_batch=4, max_text_bytes=2, max_restarts=0) as collector,
        pytest.raises(RuntimeError, match="max_text_bytes"),
    ):
        take(collector, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("batched", [False, True])
def test_a_policy_may_write_actions_of_any_precision(dtype: torch.dtype, batched: bool) -> None:
    """What autocast makes is no float32, and NumPy, by which single rows are stepped, knows no bfloat16."""
    policy = lambda td: td.set(keys.CHUNK, torch.full((*td.batch_size, 1, 2), 0.3, dtype=dtype))  # noqa: E731
    with collecting(ClockEnvs(num_envs=1, chunk_size=1, batched=batched), policy, frames_per_batch=4) as collector:
        batch = take(collector, 1)[0].reshape(-1)
    assert batch[keys.CHUNK].dtype == dtype
    sums = batch["next", "observation", "state"][:, 3] - batch[keys.STATE][:, 3]
    torch.testing.assert_close(sums, batch[keys.CHUNK].float().sum((-1, -2)))


def test_without_a_policy_it_acts_at_random_within_the_bounds() -> None:
    with collecting([CounterEnv] * 2, None, frames_per_batch=40) as collector:
        action = take(collector, 1)[0]["action"]
    assert len(action.unique()) == action.numel()
    assert bool((action.abs() <= 1).all())
    assert float(action.min()) < -0.5 < 0.5 < float(action.max())


@pytest.mark.parametrize(("kind", "push"), [(ExplorationType.RANDOM, 1.0), (ExplorationType.DETERMINISTIC, 0.0)])
def test_the_replicas_explore_as_told_whatever_the_learner_does(kind: ExplorationType, push: float) -> None:
    """And the learner's own mode stays what it is, while the replicas act."""
    other = next(mode for mode in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC) if mode != kind)
    envs = [partial(CounterEnv, number) for number in range(2)]
    with collecting(envs, Pusher(), frames_per_batch=8, exploration_type=kind) as collector, set_exploration_type(other):
        for number, batch in enumerate(collector):
            assert batch["action"].unique().tolist() == [push]
            assert exploration_type() == other
            if number == 5:
                break


def memory() -> tuple[TensorDictSequential, LSTMModule]:
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=3, hidden_size=5, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(5, 1), in_keys=["features"], out_keys=["action"])
    return TensorDictSequential(lstm, head), lstm


def remembering(lstm: LSTMModule, number: int) -> EnvBase:
    return TransformedEnv(CounterEnv(number, horizon=3), Compose(InitTracker(), lstm.make_tensordict_primer()))


def test_a_recurrent_state_is_carried_as_in_a_rollout_of_the_policy_alone() -> None:
    """Within an episode, over the end of a fragment, and back to its start where an episode ends."""
    policy, lstm = memory()
    envs = [partial(remembering, lstm, number) for number in range(2)]
    with collecting(envs, policy, frames_per_batch=8) as collector:
        collected = episodes(take(collector, 3))
    assert len(collected) > 4
    for episode in collected.values():
        state = {key: torch.zeros_like(episode[key][:1]) for key in ("recurrent_state_h", "recurrent_state_c")}
        for step in range(len(episode)):
            seen = TensorDict({"observation": episode["observation"][step : step + 1], **state}, [1])
            seen["is_init"] = torch.tensor([[step == 0]])
            for key, value in state.items():
                torch.testing.assert_close(episode[key][step : step + 1], value)
            with torch.no_grad():
                made = policy(seen)
            torch.testing.assert_close(made["action"], episode["action"][step : step + 1])
            state = {key: step_mdp(made)[key] for key in state}
            for key, value in state.items():
                torch.testing.assert_close(episode["next", key][step : step + 1], value)


def test_a_recurrent_policy_without_a_primer_is_refused_with_the_fix() -> None:
    policy, _ = memory()
    with collecting(CounterEnv, policy, frames_per_batch=8) as collector, pytest.raises(RuntimeError, match="_primer"):
        take(collector, 1)


def test_a_stock_trainer_trains_with_it() -> None:
    """PPO by TorchRL's ``Trainer`` alone; with M = 1 the version at each batch is the number of updates before it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic)
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    before = [parameter.detach().clone() for parameter in actor.parameters()]
    versions: list[int] = []
    with collecting([CounterEnv] * 2, actor, frames_per_batch=16, total_frames=64, max_in_flight=1) as collector:
        trainer = Trainer(
            collector=collector,
            total_frames=64,
            frame_skip=1,
            optim_steps_per_batch=2,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
            progress_bar=False,
        )
        buffer = ReplayBuffer(storage=LazyTensorStorage(16), sampler=SamplerWithoutReplacement(), batch_size=8)
        trainer.register_op("batch_process", lambda td: versions.append(int(td["policy_version"].unique())))
        trainer.register_op("batch_process", lambda td: gae(td).reshape(-1))
        ReplayBufferTrainer(buffer).register(trainer)
        UpdateWeights(collector, 1).register(trainer)
        trainer.train()
        assert trainer.collected_frames == 64
        assert collector.policy_version == 4
    assert versions == [0, 1, 2, 3]
    assert any(not torch.equal(old, new) for old, new in zip(before, actor.parameters(), strict=True))


@pytest.mark.parametrize("traj_format", ["padded", "cat"])
def test_whole_trajectories(traj_format: str) -> None:
    """Each exactly once, complete, and without the padding's being taken for data."""
    envs = [partial(CounterEnv, number, horizon=3 + 2 * number) for number in range(2)]
    options = {"frames_per_batch": 8, "trajs_per_batch": 3, "traj_format": traj_format}
    with collecting(envs, Pusher(), **options) as collector:
        batches = take(collector, 4)
    flat = [batch[batch["collector", "mask"]] if traj_format == "padded" else batch for batch in batches]
    found = episodes(flat)
    assert len(found) == 12, "three in each batch, none twice"
    for number, episode in found.items():
        horizon = 3 + 2 * (number % 2)
        assert episode["observation"][:, 2].tolist() == list(range(horizon))
        assert episode["next", "done"].flatten().tolist() == [False] * (horizon - 1) + [True]
    for batch in batches:
        assert batch.ndim == (2 if traj_format == "padded" else 1)
