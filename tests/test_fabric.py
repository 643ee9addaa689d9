"""What is set up with Lightning Fabric."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vla_async.fabric import make_fabric, resolve_accelerator, unpack_optimizers
from vla_async.strategies import SizeWeightedSingleDeviceStrategy


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And CUDA is not asked for in vain."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_accelerator("auto") == "cpu"
    with pytest.raises(ValueError, match=r"trainer.accelerator='cuda', but torch sees no CUDA device; use cpu or auto"):
        resolve_accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_accelerator("auto") == "cuda"
    assert resolve_accelerator("cpu") == "cpu"


def test_metrics_are_written_at_once_and_without_a_warning(tmp_path: Path) -> None:
    """A killed run must have its curve up to there; and Lightning warns of a directory with other files in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric = make_fabric("cpu", 0, "32-true", tmp_path, [])
        (tmp_path / "config.yaml").touch()
        fabric.log_dict({"loss": 1.0}, step=0)
        fabric.log_dict({"loss": 0.5, "success": 1.0}, step=1)
    assert isinstance(fabric.strategy, SizeWeightedSingleDeviceStrategy)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["success"]) for row in rows] == [("0", "1.0", ""), ("1", "0.5", "1.0")]


def test_what_configure_optimizers_may_return() -> None:
    """The forms of Lightning that mean one optimizer and a schedule by optimizer step."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert unpack_optimizers(optimizer) == (optimizer, None)
    assert unpack_optimizers({"optimizer": optimizer}) == (optimizer, None)
    assert unpack_optimizers({"optimizer": optimizer, "lr_scheduler": scheduler}) == (optimizer, scheduler)
    both = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    assert unpack_optimizers(both) == (optimizer, scheduler)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("nothing", "the optimizer NoneType and the scheduler NoneType by step"),
        ("two", "the optimizer list"),
        ("epochs", "the optimizer SGD and the scheduler ConstantLR by epoch"),
        ("no optimizer", "the optimizer NoneType and the scheduler ConstantLR"),
    ],
)
def test_what_it_may_not_return(form: str, names: str) -> None:
    """An epoch that never ends would silently be no schedule at all."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    forms: dict[str, Any] = {
        "nothing": None,
        "two": [optimizer, optimizer],
        "epochs": {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}},
        "no optimizer": {"lr_scheduler": scheduler},
    }
    with pytest.raises(ValueError, match=f"configure_optimizers gave {names}.*; return an optimizer, or"):
        unpack_optimizers(forms[form])
