"""What goes wrong between ranks ends all of them with an error that says who is missing, and what cannot work is refused."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn

from tests.strategies.ranks import message_of, run_ranks
from vla_async.strategies import SizeWeightedDDPStrategy, SizeWeightedFSDPStrategy, SizeWeightedSingleDeviceStrategy

STRATEGIES = {"ddp": SizeWeightedDDPStrategy, "fsdp": SizeWeightedFSDPStrategy}


def step_with_a_fault(rank: int, count: int, strategy: str, odd: int, fault: str, timeout: float) -> str:
    """Two steps; before the second something happens to the rank ``odd``. What the second is refused with."""
    fabric = Fabric(accelerator="cpu", devices=count, strategy=STRATEGIES[strategy](timeout=timeout))
    fabric.launch()
    model = nn.Linear(3, 1)
    _, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 3)).sum(), num_samples=2)
    optimizer.step()
    optimizer.zero_grad()
    if rank == odd and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == odd and fault == "raises":
        raise KeyError("broken data")
    if rank == odd and fault == "lags":
        time.sleep(3 * timeout)
    fabric.backward(model(torch.ones(2, 3)).sum(), num_samples=2)
    return message_of(optimizer.step)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_ends_the_others_who_name_it(strategy: str) -> None:
    first, second, killed = run_ranks(3, step_with_a_fault, 3, strategy, 2, "killed", 60.0)
    assert killed == -signal.SIGKILL
    assert "rank 0 came to a division, but rank 2 had not come" in first
    assert "rank 1 came to a division, but rank 2 had not come" in second


def test_a_rank_that_raises_ends_the_others_who_name_it() -> None:
    first, second = run_ranks(2, step_with_a_fault, 2, "fsdp", 1, "raises", 60.0)
    assert "KeyError: 'broken data'" in second
    assert "rank 0 came to a division, but rank 1 had not come" in first


def test_a_killed_rank_0_ends_the_others() -> None:
    """The store in which the ranks note that they came may have gone with it."""
    killed, second = run_ranks(2, step_with_a_fault, 2, "ddp", 0, "killed", 60.0)
    assert killed == -signal.SIGKILL
    assert "rank 1 came to a division, but rank 0 " in second


def test_a_rank_that_does_not_come_is_named_after_the_time_out() -> None:
    first, second = run_ranks(2, step_with_a_fault, 2, "ddp", 1, "lags", 2.0)
    assert "rank 0 came to a division, but rank 1 had not come (timeout=0:00:02)" in first
    assert "RuntimeError" in second, "the late rank cannot go on alone"


# ---------------------------------------------------------------- without other ranks


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_a_time_out_is_seconds_or_a_timedelta_and_positive(strategy: Any) -> None:
    assert strategy(timeout=1.5)._timeout == strategy(timeout=timedelta(seconds=1.5))._timeout == timedelta(seconds=1.5)
    with pytest.raises(ValueError, match=r"timeout=0:00:00 must be positive"):
        strategy(timeout=0)


def test_options_of_torchs_ddp_are_refused() -> None:
    """They would have no effect."""
    with pytest.raises(TypeError, match=r"has no find_unused_parameters: it does not use torch's DDP"):
        SizeWeightedDDPStrategy(find_unused_parameters=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("size_weighted_single", SizeWeightedSingleDeviceStrategy),
        ("size_weighted_ddp", SizeWeightedDDPStrategy),
        ("size_weighted_fsdp", SizeWeightedFSDPStrategy),
    ],
)
def test_fabric_knows_the_strategies_by_name(name: str, kind: type) -> None:
    assert name in STRATEGY_REGISTRY
    assert type(Fabric(accelerator="cpu", devices=1, strategy=name).strategy) is kind


def test_the_single_device_is_fabrics_unless_it_is_given() -> None:
    """By name there is nothing to say the device with, and a CPU for the accelerator cuda would be a surprise."""
    strategy = SizeWeightedSingleDeviceStrategy()
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
    assert SizeWeightedSingleDeviceStrategy("cuda:2").parallel_devices == [torch.device("cuda", 2)]


def test_a_single_device_is_not_several() -> None:
    with pytest.raises(ValueError, match="devices=2; set devices=1, or take the strategy size_weighted_ddp"):
        Fabric(accelerator="cpu", devices=2, strategy="size_weighted_single")
