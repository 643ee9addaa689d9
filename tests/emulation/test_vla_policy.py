"""The emulated VLA policy: what acting and training cost, on which devices, and that it still learns."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from vla_async import AsyncTrainer
from vla_async.emulation import EmulatedEnvs, EmulatedVLAPolicy
from vla_async.emulation import vla_policy as module
from vla_async.envs import EnvSpec
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import PPO

SPEC = EnvSpec(state_dim=2, images={}, chunk_size=2, action_low=(-1.0,), action_high=(1.0,))
COSTS = {"act_flat_s": 1.0, "act_per_row_s": 0.1, "train_flat_s": 2.0, "train_per_decision_s": 0.5}


def test_costs_are_dealt_out_to_the_devices_of_the_role() -> None:
    """Rows share the devices but every device has its flat part; of micro-batches each device has its share."""
    policy = EmulatedVLAPolicy(**COSTS, rollout_devices=2, train_devices=4)
    assert policy.act_s(20) == pytest.approx(1.0 + 0.1 * 20 / 2)
    assert policy.train_s(8) == pytest.approx((2.0 + 0.5 * 8) / 4)


def test_colocated_means_that_all_devices_do_both() -> None:
    """Equal devices for every row of an ablation: what is not split must not be fewer."""
    policy = EmulatedVLAPolicy(**COSTS, rollout_devices=2, train_devices=4, colocated=True)
    assert policy.act_s(60) == pytest.approx(1.0 + 0.1 * 60 / 6)
    assert policy.train_s(8) == pytest.approx((2.0 + 0.5 * 8) / 6)


@pytest.mark.parametrize("colocated", [True, False])
def test_copies_of_the_policy_share_its_devices(colocated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is a copy: it must find a colocated device busy while the trainer has it, and another one free."""
    policy = EmulatedVLAPolicy(colocated=colocated)
    replica = copy.deepcopy(policy)
    assert (replica._acting.path == policy._training.path) is colocated
    assert replica._acting.path == policy._acting.path


def test_acting_holds_the_device_for_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(module, "sleep_until", lambda deadline: asked.append(deadline - time.perf_counter()))
    policy = EmulatedVLAPolicy(act_flat_s=50.0, act_per_row_s=10.0)
    policy.build(SPEC)
    policy(TensorDict({"observation": {"state": torch.zeros(3, 2)}, "language_instruction": ["go"] * 3}, [3]))
    assert [round(seconds, -1) for seconds in asked] == [80.0]


def test_training_holds_the_device_for_its_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one update: the trainer's process sleeps once per micro-batch, for that micro-batch's own cost."""
    asked: list[float] = []
    monkeypatch.setattr(module, "sleep_until", lambda deadline: asked.append(deadline - time.perf_counter()))
    torch.manual_seed(0)
    policy = EmulatedVLAPolicy(PPO(), train_flat_s=50.0, train_per_decision_s=10.0)
    loop = StreamingFitLoop(decisions_per_env=2, update_epochs=2, micro_batch_size=3)
    AsyncTrainer(fit_loop=loop, max_steps=1, root_dir=tmp_path, num_threads=1, accelerator="cpu").fit(
        policy, EmulatedEnvs(num_envs=2)
    )
    del asked[0]  # the decision that the estimate of memory is made from
    # four decisions, twice: as 3 and 1
    assert [round(seconds, -1) for seconds in asked] == [80.0, 60.0, 80.0, 60.0]


def test_it_has_real_weights_that_training_changes(tmp_path: Path) -> None:
    """So that publishing, ratios and clipping are those of a real run."""
    policy = EmulatedVLAPolicy(PPO(), lr=1e-2)
    loop = StreamingFitLoop(decisions_per_env=4, update_epochs=1)
    trainer = AsyncTrainer(fit_loop=loop, max_steps=2, root_dir=tmp_path, num_threads=1, accelerator="cpu")
    trainer.fit(policy, EmulatedEnvs(num_envs=2, max_episode_steps=4))
    again = EmulatedVLAPolicy.load_from_checkpoint(trainer.run.checkpoints / "last.ckpt")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in policy.state_dict().items())
    fresh = EmulatedVLAPolicy()
    assert policy.env_spec is not None
    torch.manual_seed(trainer.seed)
    fresh.build(policy.env_spec)
    assert any(not torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"act_flat_s": -1.0}, "model.act_flat_s=-1.0 must be 0 or a positive number of seconds"),
        ({"train_per_decision_s": float("nan")}, "model.train_per_decision_s=nan must be"),
        ({"train_devices": 0}, "model.train_devices=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedVLAPolicy(**setting)  # type: ignore[arg-type]
