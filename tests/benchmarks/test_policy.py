"""The benchmark of policies measures every policy that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.policy import POLICIES, main, make_policy


def test_more_rows_take_more_memory_and_all_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, gradients and Adam's moments are in the peak of training; a CPU's two peaks tell little of each other."""
    options = ["--policies", "pi0", "--batch-sizes", "1", "32", "--repeats", "1", "--json", str(tmp_path / "points.json")]
    one, many = main(options)
    assert (one.batch_size, many.batch_size) == (1, 32)
    assert one.trained == one.parameters > 500_000
    assert many.act_bytes > 2 * one.act_bytes > 2 * 4 * one.parameters
    assert many.train_bytes > 2 * one.train_bytes > 2 * 16 * one.parameters
    written = json.loads((tmp_path / "points.json").read_text())
    assert [point["train_s"] for point in written] == [one.train_s, many.train_s]
    assert "act memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--freeze", "vlm"], "--freeze vlm leaves nothing of openvla_oft to train"),
        (["--repeats", "0"], "0 must be at least 1"),
    ],
)
def test_what_would_fail_after_minutes_is_refused_at_once(options, said, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed before all policies are measured, so the last one's refusal would cost all others."""
    with pytest.raises(SystemExit):
        main(options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", POLICIES)
def test_small_networks_are_small_and_can_be_adapted(name: str) -> None:
    """They are for machines without a GPU."""
    import argparse

    import torch

    options = argparse.Namespace(size="small", freeze="vision", dtype="float32", gradient_checkpointing=True, lora_rank=2)
    policy = make_policy(name, options, torch.device("cpu"))
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert 0 < trained < sum(parameter.numel() for parameter in policy.parameters()) < 3e6
