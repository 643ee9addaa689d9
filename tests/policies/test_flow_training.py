"""A flow-matching policy learns: by imitation, and with the optimizer that it configures; and it is saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.policies.flow_fakes import HORIZON, MODEL_DIM, A, FakeFlowPolicy, H, make_flow, observe
from vla_async import keys


def demonstrate(policy: FakeFlowPolicy, rows: int) -> TensorDict:
    """Every observation is answered by the same chunk, in the env's units; some are cut."""
    td = observe(policy, rows)
    td[keys.CHUNK] = torch.tensor([[1.0, 0.1], [-1.0, 0.2], [0.5, 0.4]]).expand(rows, H, A).clone()
    td[keys.ACTION_IS_PAD] = (torch.arange(H) >= 2).expand(rows, H) & (torch.arange(rows) % 3 == 0).unsqueeze(-1)
    return td


def test_the_imitation_loss_is_the_flow_matching_error_of_what_is_shown():
    """With all randomness fixed, against the formula written out row by row."""
    policy = make_flow()
    batch = demonstrate(policy, 6)
    noise = torch.randn(6, HORIZON, MODEL_DIM)
    times = torch.linspace(0.1, 1.0, 6)
    policy.sample_time = lambda rows: times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda _: noise)
        output = policy.imitation_step(batch)
    total, count = 0.0, 0
    for row in range(6):
        action = torch.zeros(HORIZON, MODEL_DIM)
        action[:H, :A] = policy.normalize_actions(batch[keys.CHUNK][row])
        action[H:] = action[H - 1]
        x_t = (1 - times[row]) * action + times[row] * noise[row]
        prefix = policy.prefix(batch[row : row + 1])
        velocity = policy.velocity(prefix, x_t.unsqueeze(0), times[row : row + 1])[0]
        shown = H - int(batch[keys.ACTION_IS_PAD][row].sum())
        total += ((velocity - (noise[row] - action))[:shown] ** 2).sum().item()
        count += shown * MODEL_DIM
    assert output.num_samples == count
    assert output.loss.item() == pytest.approx(total, rel=1e-5)
    assert output.metrics["sft/flow_matching"][0].item() == pytest.approx(total, rel=1e-5)


def test_imitation_teaches_the_chunk_that_is_shown():
    policy = make_flow(num_steps=8, lr=1e-2)
    optimizer = policy.configure_optimizers()
    batch = demonstrate(policy, 96)
    for _ in range(400):
        optimizer.zero_grad()
        output = policy.imitation_step(batch)
        (output.loss / output.num_samples).backward()
        optimizer.step()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        chunk = policy.act(observe(policy, 32))[keys.CHUNK]
    error = (policy.normalize_actions(chunk) - policy.normalize_actions(demonstrate(policy, 32)[keys.CHUNK])).abs()
    assert error.mean() < 0.1, error.mean()


def test_times_favour_noise_and_never_leave_their_range():
    torch.manual_seed(0)
    times = make_flow().sample_time(20_000)
    assert 0.001 <= times.min() < 0.02
    assert 0.99 < times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.6, abs=0.01)  # of Beta(1.5, 1)


def test_the_optimizer_has_actor_and_critic_apart_and_nothing_frozen():
    policy = make_flow(lr=1e-3, critic_lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9), noise="flow_noise")
    optimizer = policy.configure_optimizers()
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    seen: dict[str, tuple[float, float]] = {}
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9)
        seen |= {names[id(parameter)]: (group["lr"], group["weight_decay"]) for parameter in group["params"]}
    assert set(seen) == {name for name in names.values() if not name.startswith("frozen")}
    assert seen["out.weight"] == (1e-3, 0.1)
    assert seen["out.bias"] == (1e-3, 0.0)
    assert seen["exploration.std_net.0.weight"] == (1e-3, 0.1)
    assert seen["value_head.layers.0.weight"] == (2e-3, 0.1)
    assert seen["value_head.norm.weight"] == (2e-3, 0.0)
    shared = make_flow(lr=1e-3, critic_lr=None).configure_optimizers()
    assert {group["lr"] for group in shared.param_groups} == {1e-3}


@pytest.mark.parametrize("options", [{"noise": "flow_noise", "value": "suffix"}, {"num_steps": 7, "value": None}])
def test_a_checkpoint_makes_the_same_policy(options: dict[str, Any], tmp_path: Path):
    """The options of the base and of the subclass both travel, and all weights, those of the noise included."""
    policy = make_flow(**options)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    checkpoint = {"state_dict": policy.state_dict(), "hyper_parameters": dict(policy.hparams)}
    checkpoint["pytorch-lightning_version"] = lightning.__version__
    policy.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "flow.ckpt")
    loaded = FakeFlowPolicy.load_from_checkpoint(tmp_path / "flow.ckpt")
    assert dict(loaded.hparams) == dict(policy.hparams)
    mine, others = policy.act(observe(policy, 5)), loaded.act(observe(policy, 5))
    assert all(torch.equal(mine[key], others[key]) for key in mine.keys(include_nested=True, leaves_only=True))
