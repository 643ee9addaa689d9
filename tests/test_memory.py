"""What a run will take is counted before it begins, and refused with numbers if it cannot fit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs, KnownPolicy, make_trainer
from tests.policies.vla_fakes import SPEC, tiny_pi0_config
from vla_async import memory
from vla_async.__main__ import main
from vla_async.callbacks import Callback
from vla_async.envs import ToyEnvs
from vla_async.loops import SFTLoop, StreamingFitLoop, SyncFitLoop
from vla_async.memory import HOST, SHARED, Decision, MemoryEstimate, Part, Work, estimate_memory, work_of
from vla_async.objectives import GRPO, PPO
from vla_async.policies import TinyVLAPolicy
from vla_async.policies.measuring import measure_decision
from vla_async.policies.pi0 import Pi0Policy

CPU = torch.device("cpu")
KIB = 1024


def make_pi0(**options: Any) -> Pi0Policy:
    policy = Pi0Policy(**{"config": tiny_pi0_config(), "num_steps": 2} | options)
    policy.build(SPEC)
    return policy


def linear_policy(**options: Any) -> Any:
    """A policy with a parameter of 4 bytes, and nothing else."""
    policy = KnownPolicy()
    policy.build(SPEC)
    policy.objective = options.get("objective")
    return policy


def test_every_part_of_a_run_is_counted_where_it_lies() -> None:
    """Ten decisions in a micro-batch, twenty in an update, 25 rows of a slab, one replica, Adam."""
    policy, gpu = linear_policy(objective=GRPO(kl_coef=0.1)), torch.device("cuda", 0)
    work, decision = Work(10, 20, 25, (CPU, gpu, gpu)), Decision(seen=100, made=7, kept=1000)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    assert estimate_memory(policy, optimizer, gpu, work, decision).to_dict() == {
        "cuda:0": {
            "weights": 4,
            "gradients": 4,
            "optimizer": 8,
            "reference of kl_coef": 4,
            "activations": 10_000,
            "global batch": 20 * 207,
            "replicas": 8,
            "total": 10_028 + 20 * 207,
        },
        HOST: {"state of the last update": 12, "replicas": 4, "total": 16},
        SHARED: {"slab": 25 * 107, "weights to publish": 8, "total": 25 * 107 + 8},
    }
    json.dumps(estimate_memory(policy, optimizer, gpu, work, decision).to_dict())


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3),
    ],
)
def test_the_optimizers_state_is_what_it_becomes_after_a_step(make: Any, moments: int) -> None:
    """An optimizer has no state yet when it is asked for; so the state is foretold."""
    layer = torch.nn.Linear(30, 40)
    optimizer = make(layer.parameters())
    assert memory._optimizer_bytes(optimizer) == moments * 4 * (30 * 40 + 40)
    layer(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert sum(tensor.nbytes for tensor in tensors if tensor.ndim) == memory._optimizer_bytes(optimizer)


def test_low_rank_additions_shrink_all_but_the_weights() -> None:
    """The reason to use them: without this in the estimate, a run that fits would be refused."""

    def estimate(policy: Pi0Policy) -> dict[str, int]:
        work = Work(4, 8, 10, (CPU,))
        return estimate_memory(policy, policy.configure_optimizers(), CPU, work, Decision(1, 1, 1)).to_dict()[HOST]

    whole, adapted = estimate(make_pi0()), estimate(make_pi0(lora={"rank": 1, "targets": ["q_proj"]}))
    for name in ("gradients", "optimizer", "state of the last update"):
        assert adapted[name] < 0.7 * whole[name]
    assert adapted["weights"] > whole["weights"]


def test_fsdp_shards_the_optimizer_and_keeps_what_it_gathers() -> None:
    """Per float32 parameter 8 + 8 / n bytes, and a shard of the weights, frozen ones too, and of the gradient."""
    policy = make_pi0(freeze="vision")
    arguments = (policy, policy.configure_optimizers(), CPU, Work(0, 0), Decision(0, 0, 0))
    one, four = (estimate_memory(*arguments, shards=shards).to_dict()[HOST] for shards in (1, 4))
    trained = one["gradients"]
    assert one["optimizer"] == 2 * trained
    assert four["optimizer"] == trained // 2
    assert four["gradients"] == trained + trained // 4
    assert four["weights"] == one["weights"] + one["weights"] // 4


# ---------------------------------------------------------------- what a decision takes


@pytest.mark.parametrize("imitate", [False, True])
def test_measuring_leaves_the_policy_and_the_random_numbers_as_they_were(imitate: bool) -> None:
    """A run that was measured must be the same as one that was not."""
    policy = make_pi0(dtype="float32")
    policy.eval()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    state = torch.get_rng_state()
    decision = measure_decision(policy, CPU, nullcontext(), imitate)
    assert torch.equal(torch.get_rng_state(), state)
    assert not policy.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())
    pixels = 3 * 20 * 24 + 3 * 16 * 16
    assert decision.seen == pixels + 5 * 4 + 48 * 8 + 8
    assert decision.made > (3 * 3 + 3 * 3 + 1) * 4, "chunk, log-prob and value, and what they are recomputed from"


def test_what_is_kept_is_what_the_backward_pass_needs() -> None:
    """It grows with the model, without the weights themselves, and shrinks with checkpointing."""
    config = tiny_pi0_config()
    wide = {**config, "text": config["text"] | {"intermediate_size": 320}}
    plain, larger, less = (
        measure_decision(make_pi0(**options), CPU, nullcontext(), False).kept
        for options in ({}, {"config": wide}, {"gradient_checkpointing": True})
    )
    assert larger > 1.3 * plain
    assert less < 0.5 * plain
    tiny = TinyVLAPolicy(hidden=[1000, 1000])
    tiny.build(SPEC)
    weights = sum(parameter.nbytes for parameter in tiny.parameters())
    assert measure_decision(tiny, CPU, nullcontext(), False).kept < 0.2 * weights


# ---------------------------------------------------------------- what a loop deals with


def test_each_loop_says_what_it_deals_with(tmp_path: Path) -> None:
    """T decisions of each env; slots of 2 T + 1 rows for η + 1 updates; micro-batches where they are set."""
    trainer = make_trainer(tmp_path)
    trainer.policy, trainer.env = TinyVLAPolicy(PPO()), ClockEnvs(num_envs=3)
    assert work_of(SyncFitLoop(5), trainer) == Work(15, 15)
    assert work_of(SyncFitLoop(5, mini_batch_size=6), trainer) == Work(6, 15)
    assert work_of(StreamingFitLoop(5, micro_batch_size=4, max_staleness=2), trainer) == Work(4, 15, 3 * 3 * 11, (CPU,))
    assert work_of(SFTLoop(batch_size=8, micro_batch_size=2), trainer) == Work(2, 8, section="sft_loop")


class Slabs(Callback):
    """Notes how large the slab is."""

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        layout = trainer.fit_loop._fleet.slab.layout
        self.nbytes, self.rows = layout.nbytes, layout.num_slots * layout.rows_per_slot


def test_the_slab_is_nearly_as_large_as_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate knows all that the policy sees and writes; texts and notes of the envs are some hundred bytes a row."""
    slabs, estimates = Slabs(), list[MemoryEstimate]()
    monkeypatch.setattr(MemoryEstimate, "check", lambda self: estimates.append(self))
    trainer = make_trainer(tmp_path, fit_loop=StreamingFitLoop(3), max_steps=1, callbacks=[slabs], num_threads=1)
    policy = TinyVLAPolicy(PPO(), hidden=[8])
    trainer.fit(policy, ToyEnvs(num_envs=2, chunk_size=2, obs="rgb+state"))
    estimated = estimates[0].to_dict()[SHARED]["slab"]
    assert estimated < slabs.nbytes < estimated + 1500 * slabs.rows
    assert estimated > slabs.rows * 3 * 16 * 16, "the image is in it"


# ---------------------------------------------------------------- what is refused


def test_what_fits_exactly_passes_and_one_byte_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how much of what, how much is free, and what to set. What is there already does not count again."""
    free = {HOST: 9 * KIB, SHARED: 5 * KIB, "cuda:0": 3 * KIB}
    monkeypatch.setattr(memory, "free_bytes", free.__getitem__)
    parts = (
        Part("weights", HOST, 100 * KIB, "model.dtype=bfloat16", is_held=True),
        Part("gradients", HOST, 1 * KIB, "model.lora"),
        Part("activations", HOST, 3 * KIB, "fit_loop.micro_batch_size"),
        Part("slab", SHARED, 5 * KIB, "fit_loop.max_staleness"),
        Part("replicas", "cuda:0", 3 * KIB, "fewer"),
    )
    estimate = MemoryEstimate(parts)
    estimate.check()
    free[HOST] -= 1
    with pytest.raises(MemoryError) as refused:
        estimate.check()
    assert str(refused.value) == (
        "the run would need 9 KiB of host beyond what it has, but 9 KiB are free: slab 5 KiB, activations 3 KiB, gradients "
        "1 KiB. Set fit_loop.max_staleness; fit_loop.micro_batch_size; model.lora. This is an estimate: "
        "trainer.check_memory=false goes on without"
    )
    free[HOST] += 1
    for place in (SHARED, "cuda:0"):
        free[place] -= 1
        with pytest.raises(MemoryError, match=f"of {place} beyond"):
            estimate.check()
        free[place] += 1


def test_weights_that_are_too_many_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would say how much it could not get, but not what to set."""
    policy = make_pi0()
    monkeypatch.setattr(memory, "free_bytes", lambda place: 1000)
    memory.check_weights_fit(policy, CPU)
    with pytest.raises(
        MemoryError, match=r"of cuda:0 .*1000 B are free: weights \d+ KiB\. Set model\.dtype=bfloat16\. This"
    ):
        memory.check_weights_fit(policy, torch.device("cuda", 0))


def test_the_command_line_refuses_in_a_line_and_can_be_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback, and not after an hour of rollouts."""
    monkeypatch.setattr(memory, "free_bytes", lambda place: 1000)
    options = ["--trainer.root_dir", str(tmp_path), "--trainer.max_steps", "1", "--trainer.val_every_n_steps", "0"]
    sizes = ["--env.num_envs", "2", "--trainer.fit_loop.mini_batch_size", "8"]
    command = ["fit", "--config", "recipes/toy_ppo.yaml", *options, *sizes]
    assert main(command) == 1
    said = capsys.readouterr()
    assert "memory, estimated" in said.out
    assert said.err.startswith("vla-async: the run would need ")
    assert "Set a smaller model" in said.err, "this policy has no setting of that kind"
    assert main([*command, "--trainer.check_memory", "false"]) == 0
    assert "memory, estimated" not in capsys.readouterr().out
