"""TrainState: what a checkpoint holds, who can read it, and what a failed write or a foreign file does."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tensordict import TensorDict

from tests.fakes import equal, tiny
from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.fabric import make_fabric
from vla_async.objectives import PPO
from vla_async.policies import TinyVLAPolicy
from vla_async.state import Counters, TrainState, find_checkpoint, load_weights, read_checkpoint

SPEC = EnvSpec((-1.0, -1.0), (1.0, 1.0), chunk_size=2, state_dim=3)


def make_state(stage: str = "fit", spec: EnvSpec = SPEC, scheduler: bool = False, **options: Any) -> TrainState:
    """The state of a run that has taken one optimizer step."""
    policy = tiny(**options)
    policy.build(spec)
    optimizer = policy.configure_optimizers()
    sum((parameter**2).sum() for parameter in policy.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduler else None
    counters = Counters(step=3, optimizer_steps=5, env_steps=70, episodes=2, elapsed_s=1.5, best_success=0.5)
    return TrainState(stage, policy, optimizer, schedule, counters, loop={"collector": {"decisions": 4}})


@pytest.fixture
def fabric(tmp_path: Path) -> Fabric:
    return make_fabric("cpu", 0, "32-true", tmp_path / "fabric", [])


def test_a_checkpoint_brings_everything_back(tmp_path: Path, fabric: Fabric) -> None:
    """Weights, optimizer, scheduler, objective, counters, the loop's state and the random state."""
    state = make_state(scheduler=True)
    assert isinstance(state.policy.objective, PPO)
    state.policy.objective.updates = 3
    state.save(fabric, tmp_path / "last.ckpt")
    expected = torch.rand(4)
    fresh = make_state(scheduler=True)
    fresh.counters, fresh.loop = Counters(), {}
    torch.manual_seed(99)
    fresh.load(tmp_path / "last.ckpt")
    assert equal(fresh.policy.state_dict(), state.policy.state_dict())
    assert equal(fresh.optimizer.state_dict(), state.optimizer.state_dict())
    assert fresh.scheduler is not None
    assert state.scheduler is not None
    assert fresh.scheduler.state_dict() == state.scheduler.state_dict()
    assert isinstance(fresh.policy.objective, PPO)
    assert fresh.policy.objective.updates == 3
    assert fresh.counters == state.counters
    assert fresh.loop == state.loop
    assert torch.equal(torch.rand(4), expected)


def decide(policy: TinyVLAPolicy) -> torch.Tensor:
    source = {
        keys.OBSERVATION: TensorDict({"state": torch.tensor([[0.1, -0.2, 0.3]])}, batch_size=[1]),
        keys.INSTRUCTION_TOKENS: policy.tokenize("lift the cube").unsqueeze(0),
        keys.REQUEST_KEY: torch.tensor([[5]]),
    }
    chunk: torch.Tensor = policy.act(TensorDict(source, batch_size=[1]))[keys.CHUNK]
    return chunk


def test_torch_fabric_and_lightning_read_it(tmp_path: Path, fabric: Fabric) -> None:
    """A checkpoint serves those who do not use this trainer: safely, and without the envs at hand."""
    state = make_state()
    state.save(fabric, tmp_path / "last.ckpt")
    for content in (
        torch.load(tmp_path / "last.ckpt", weights_only=True),
        Fabric(accelerator="cpu", devices=1).load(tmp_path / "last.ckpt", weights_only=True),
    ):
        assert equal(content["state_dict"], dict(state.policy.state_dict()))
        assert content["counters"]["step"] == 3
    loaded = TinyVLAPolicy.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert loaded.env_spec == SPEC
    assert loaded.hparams["hidden"] == [16, 16]
    assert isinstance(state.policy, TinyVLAPolicy)
    assert torch.equal(decide(loaded), decide(state.policy))


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of days must not lose its only checkpoint to the attempt to write a newer one."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    state = make_state()
    state.save(fabric, path)
    state.counters.step = 4

    def full(target: Path, content: Any) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fabric, "save", full)
    with pytest.raises(
        RuntimeError, match=r"last.ckpt could not be written: .*No space left.*the previous last.ckpt is kept"
    ):
        state.save(fabric, path)
    assert read_checkpoint(path)["counters"]["step"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    with pytest.raises(RuntimeError, match=r"No space left on device$"):
        state.save(fabric, tmp_path / "first.ckpt")


def test_a_checkpoint_of_another_stage_is_refused(tmp_path: Path, fabric: Fabric) -> None:
    """Its counters and optimizer mean something else; the message says what to do with its weights."""
    make_state("sft").save(fabric, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last.ckpt was written by 'sft', so 'fit' cannot resume it; .*trainer.init_from"):
        make_state("fit").load(tmp_path / "last.ckpt")
    assert read_checkpoint(tmp_path / "last.ckpt")["stage"] == "sft", "its weights alone may be wanted"


def test_weights_of_other_shapes_are_refused(tmp_path: Path, fabric: Fabric) -> None:
    """The message must name the tensors."""
    make_state(hidden=(8, 8)).save(fabric, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"(?s)weights of .*last.ckpt do not fit this TinyVLAPolicy: .*actor.0.weight"):
        make_state().load(tmp_path / "last.ckpt")
    policy = tiny()
    policy.build(SPEC)
    with pytest.raises(ValueError, match="do not fit this TinyVLAPolicy"):
        load_weights(policy, read_checkpoint(tmp_path / "last.ckpt"), tmp_path / "last.ckpt")


def test_another_optimizer_or_schedule_is_refused(tmp_path: Path, fabric: Fabric) -> None:
    """Silently going on with another schedule is another run."""
    state = make_state(scheduler=True)
    state.save(fabric, tmp_path / "scheduled.ckpt")
    with pytest.raises(ValueError, match=r"scheduled.ckpt and this run differ: this run has no learning-rate scheduler"):
        make_state().load(tmp_path / "scheduled.ckpt")
    make_state().save(fabric, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"this run has a learning-rate scheduler"):
        make_state(scheduler=True).load(tmp_path / "plain.ckpt")
    other = make_state()
    other.optimizer = torch.optim.SGD(other.policy.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer of .*plain.ckpt does not fit this run's"):
        other.load(tmp_path / "plain.ckpt")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("owned"),)


def test_foreign_and_broken_files_are_refused(tmp_path: Path, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message instead of a stack of torch's, and without running anything that they hold."""
    monkeypatch.chdir(tmp_path)
    make_state().save(fabric, tmp_path / "whole.ckpt")
    whole = (tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "text.ckpt").write_text("weights")
    (tmp_path / "bad.ckpt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    for name in ("cut", "empty", "text", "bad"):
        with pytest.raises(ValueError, match=f"{name}.ckpt cannot be read as a checkpoint"):
            read_checkpoint(tmp_path / f"{name}.ckpt")
    assert not (tmp_path / "owned").exists()
    torch.save({"model": torch.zeros(1)}, tmp_path / "other.ckpt")
    torch.save(torch.zeros(1), tmp_path / "tensor.ckpt")
    for name in ("other", "tensor"):
        with pytest.raises(ValueError, match=f"{name}.ckpt is no checkpoint of vla_async: it lacks"):
            read_checkpoint(tmp_path / f"{name}.ckpt")


def test_a_checkpoint_is_found_by_its_name(tmp_path: Path, fabric: Fabric) -> None:
    """``last`` of the newest run, read and checked in one go."""
    path = tmp_path / "name" / "2026-01-01_00-00-00" / "checkpoints" / "last.ckpt"
    make_state().save(fabric, path)
    assert find_checkpoint(None, tmp_path, "name") is None
    found = find_checkpoint("last", tmp_path, "name", stage="fit")
    assert found is not None
    assert found[1] == path
    assert found[0]["counters"]["env_steps"] == 70
    with pytest.raises(ValueError, match="so 'sft' cannot resume it"):
        find_checkpoint("last", tmp_path, "name", stage="sft")


def test_reinforcement_learning_starts_from_imitation_although_it_ran_before(tmp_path: Path, fabric: Fabric) -> None:
    """Whoever repeats a fit from ``last`` means the imitated policy, not what the first fit made of it."""
    for second, stage in enumerate(("sft", "fit")):
        state = make_state()
        state.stage = stage
        state.save(fabric, tmp_path / "name" / f"2026-01-01_00-00-0{second}" / "checkpoints" / "last.ckpt")
        os.utime(tmp_path / "name" / f"2026-01-01_00-00-0{second}" / "checkpoints" / "last.ckpt", (second, second))
    for options, stage in (({"prefer": "sft"}, "sft"), ({"stage": "fit"}, "fit"), ({"stage": "sft"}, "sft"), ({}, "fit")):
        found = find_checkpoint("last", tmp_path, "name", **options)
        assert found is not None
        assert found[0]["stage"] == stage
