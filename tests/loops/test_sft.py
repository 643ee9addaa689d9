"""SFTLoop: imitation learns, resumes, and imitates no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.fakes import ClockEnvs, Metrics, Steady, equal, make_trainer, tiny
from vla_async import keys
from vla_async.data import Demonstrations
from vla_async.loops import CollectLoop, SFTLoop
from vla_async.objectives import StepOutput
from vla_async.policies import TinyVLAPolicy
from vla_async.trainer import AsyncTrainer

ENVS = ClockEnvs(num_envs=1, chunk_size=2, success_at=3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of three frames, all with the action (0.5, 0.5)."""
    directory = tmp_path_factory.mktemp("collected") / "set"
    CollectLoop(Steady(0.5), num_episodes=6, directory=directory).run(ENVS, seed=0)
    return directory


def imitate(
    root: Path, dataset: Path, policy: TinyVLAPolicy, ckpt_path: str | None = None, **loop: Any
) -> tuple[AsyncTrainer, dict[int, dict[str, float]]]:
    metrics = Metrics()
    options: dict[str, Any] = {"max_steps": 12, "batch_size": 8, "log_every_n_steps": 4} | loop
    # an estimate of the memory would imitate once more
    trainer = make_trainer(root, sft_loop=SFTLoop(dataset, **options), callbacks=[metrics], check_memory=False)
    trainer.sft(policy, ENVS, ckpt_path=ckpt_path)
    return trainer, metrics.steps


@pytest.mark.parametrize(("head", "metric"), [("gaussian", "sft/squared_error"), ("tokens", "sft/nll")])
def test_imitation_comes_to_do_what_was_demonstrated(tmp_path: Path, dataset: Path, head: Any, metric: str) -> None:
    """The loss falls, and the policy's own action is the demonstrator's."""
    policy = tiny(objective=None, head=head, lr=3e-2)
    _, metrics = imitate(tmp_path, dataset, policy, max_steps=60, log_every_n_steps=20)
    assert sorted(metrics) == [20, 40, 60]
    assert metrics[60][metric] < 0.25 * metrics[20][metric]
    data = Demonstrations(dataset, chunk_size=2)
    batch = data.decisions(torch.arange(18), data.tokens(policy))
    with torch.no_grad():
        mean = policy.head.mode(policy._act_outputs(*policy._see(batch)))["chunk"]
    assert (mean - 0.5).abs().mean() < 0.15


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dataset: Path) -> None:
    """Weights, optimizer and the batches that follow."""
    whole, metrics = imitate(tmp_path / "whole", dataset, tiny(objective=None), max_steps=12)
    imitate(tmp_path / "cut", dataset, tiny(objective=None), max_steps=8)
    resumed, later = imitate(tmp_path / "cut", dataset, tiny(objective=None), ckpt_path="last", max_steps=12)
    assert sorted(later) == [12]
    assert equal(later[12], metrics[12])
    assert equal(whole.policy.state_dict(), resumed.policy.state_dict())
    assert equal(whole.state.optimizer.state_dict(), resumed.state.optimizer.state_dict())
    assert resumed.state.counters.optimizer_steps == 12


def test_an_interrupt_between_two_rows_of_metrics_loses_no_step(tmp_path: Path, dataset: Path) -> None:
    """Ctrl-C mostly comes between; the steps done must be counted, or their batches would be imitated twice."""

    class Interrupted(TinyVLAPolicy):
        calls = 0

        def imitation_step(self, batch: TensorDictBase) -> StepOutput:
            self.calls += 1
            if self.calls == 7:
                raise KeyboardInterrupt
            return super().imitation_step(batch)

    whole, _ = imitate(tmp_path / "whole", dataset, tiny(objective=None))
    policy = Interrupted(hidden=(16, 16), vocab_size=64, instruction_dim=4)
    with pytest.raises(KeyboardInterrupt):
        imitate(tmp_path / "cut", dataset, policy)
    resumed, _ = imitate(tmp_path / "cut", dataset, tiny(objective=None), ckpt_path="last")
    assert equal(whole.policy.state_dict(), resumed.policy.state_dict())


def test_micro_batches_do_not_change_the_result(tmp_path: Path, dataset: Path) -> None:
    """Only the order of a sum differs."""
    whole, _ = imitate(tmp_path, dataset, tiny(objective=None))
    split, _ = imitate(tmp_path, dataset, tiny(objective=None), micro_batch_size=3)
    for name, value in whole.policy.state_dict().items():
        torch.testing.assert_close(split.policy.state_dict()[name], value, rtol=0.0, atol=2e-5)


class Watching(TinyVLAPolicy):
    """Keeps the batches that it imitates, and what it was told to observe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batches: list[TensorDictBase] = []
        self.observed: list[int] = []

    def observe(self, frames: TensorDictBase) -> None:
        self.observed.append(len(frames))
        super().observe(frames)

    def imitation_step(self, batch: TensorDictBase) -> StepOutput:
        self.batches.append(batch.clone())
        return super().imitation_step(batch)


def test_padding_is_not_imitated(tmp_path: Path, dataset: Path) -> None:
    """Whatever stands behind an episode's end must make no difference to what is learned."""

    class Spoiled(Watching):
        def imitation_step(self, batch: TensorDictBase) -> StepOutput:
            pad = batch[keys.ACTION_IS_PAD].unsqueeze(-1)
            return super().imitation_step(batch.set(keys.CHUNK, torch.where(pad, 1e6, batch[keys.CHUNK])))

    plain, _ = imitate(tmp_path, dataset, Watching(hidden=(16, 16)))
    spoiled, _ = imitate(tmp_path, dataset, Spoiled(hidden=(16, 16)))
    padded = torch.cat([batch[keys.ACTION_IS_PAD] for batch in plain.policy.batches])  # type: ignore[attr-defined]
    assert padded.any()
    assert not padded.all()
    assert equal(plain.policy.state_dict(), spoiled.policy.state_dict())


def test_max_episodes_uses_the_first_ones_only(tmp_path: Path, dataset: Path) -> None:
    """A mediocre baseline is made from few demonstrations: the others must not be seen, in the statistics either."""
    policy = Watching(hidden=(16, 16))
    trainer, _ = imitate(tmp_path, dataset, policy, max_episodes=2)
    first = Demonstrations(dataset, chunk_size=2, max_episodes=2).frames[keys.STATE][:, 0].unique()
    seen = torch.cat([batch[keys.STATE][:, 0] for batch in policy.batches]).unique()
    assert torch.equal(seen, first)
    assert policy.observed == [6]
    assert trainer.state.counters.step == len(policy.batches) == 12


def test_statistics_are_taken_once(tmp_path: Path, dataset: Path) -> None:
    """A resumed run must not normalise anew: the weights were trained on the old statistics."""
    imitate(tmp_path, dataset, tiny(objective=None), max_steps=4)
    policy = Watching(hidden=(16, 16), vocab_size=64, instruction_dim=4)
    imitate(tmp_path, dataset, policy, ckpt_path="last", max_steps=8)
    assert policy.observed == []
    assert not torch.equal(policy.state_mean, torch.zeros_like(policy.state_mean))


def test_the_chunk_length_is_that_of_the_envs(tmp_path: Path, dataset: Path) -> None:
    """Demonstrations are stored by env step, so that one set serves any chunk length."""
    policy = tiny(objective=None)
    trainer = make_trainer(tmp_path, sft_loop=SFTLoop(dataset, max_steps=1, batch_size=4))
    trainer.sft(policy, ClockEnvs(chunk_size=3))
    assert policy.env_spec is not None
    assert policy.env_spec.chunk_size == 3


def test_no_env_is_built(tmp_path: Path, dataset: Path) -> None:
    """Imitation needs no simulator, so it must run where there is none."""
    trainer = make_trainer(tmp_path, sft_loop=SFTLoop(dataset, max_steps=1, batch_size=4))
    trainer.sft(tiny(objective=None), ClockEnvs(chunk_size=2, fault="raise-in-build"))
    assert trainer.state.counters.step == 1


def test_a_missing_dataset_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    """With the command that collects one."""
    trainer = make_trainer(tmp_path / "runs", sft_loop=SFTLoop(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"sft_loop.directory='.*nowhere' holds no demonstrations"):
        trainer.sft(tiny(objective=None), ENVS)
    assert not (tmp_path / "runs").exists()


def test_demonstrations_of_another_task_are_refused_before_a_run_is_made(tmp_path: Path, dataset: Path) -> None:
    """They would be imitated without a word, and the policy would fail in its envs."""
    trainer = make_trainer(tmp_path / "runs", sft_loop=SFTLoop(dataset))
    with pytest.raises(ValueError, match=r"sft_loop.directory='.*set' shows clock, but env has bell; collect"):
        trainer.sft(tiny(objective=None), ClockEnvs(chunk_size=2, names=("bell",)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "sft_loop.max_steps=0 must be at least 1"),
        ({"batch_size": 0}, "sft_loop.batch_size=0 must be at least 1"),
        ({"max_episodes": 0}, "sft_loop.max_episodes=0 must be at least 1"),
        ({"log_every_n_steps": 0}, "sft_loop.log_every_n_steps=0 must be at least 1"),
        ({"batch_size": 4, "micro_batch_size": 5}, "sft_loop.micro_batch_size=5 is larger than sft_loop.batch_size=4"),
        ({"max_grad_norm": -1.0}, "sft_loop.max_grad_norm=-1.0 must be positive, or null"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """By field, value and fix."""
    with pytest.raises(ValueError, match=message):
        SFTLoop(**options)
