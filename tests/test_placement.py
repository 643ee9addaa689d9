"""Placement: which devices decide, and which combinations are refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vla_async.placement import Placement

CPU, CUDA0, CUDA1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "nearby"}, r"mode='nearby': choose colocated, disaggregated or hybrid"),
        ({"rollout_devices": []}, r"rollout_devices is empty; give at least one device, or null"),
        ({"mode": "disaggregated"}, r"mode='disaggregated' needs placement.rollout_devices, for example"),
        ({"mode": "hybrid"}, r"mode='hybrid' needs placement.rollout_devices"),
        ({"mode": "disaggregated", "rollout_devices": ["meta"]}, r"rollout_devices has 'meta': choose cpu, or cuda"),
        ({"mode": "disaggregated", "rollout_devices": ["gpu:1"]}, r"rollout_devices has 'gpu:1'"),
    ],
    ids=str,
)
def test_settings_that_contradict_themselves_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(**settings)


@pytest.mark.parametrize(
    ("settings", "training", "message"),
    [
        ({"rollout_devices": ["cuda:1"]}, [CUDA0], r"\['cuda:1'\] are not the devices that train, \['cuda:0'\]; use"),
        (
            {"mode": "disaggregated", "rollout_devices": ["cuda:0", "cuda:1"]},
            [CUDA0],
            r"share \['cuda:0'\] with training; use hybrid",
        ),
        ({"mode": "hybrid", "rollout_devices": ["cuda:1"]}, [CUDA0], r"must hold a device that trains, \['cuda:0'\]"),
        ({"mode": "hybrid", "rollout_devices": ["cuda:0"]}, [CUDA0], r"and another; or use another mode"),
        ({"mode": "disaggregated", "rollout_devices": ["cuda:7"]}, [CPU], r"cuda:7 does not exist, torch sees 2 CUDA"),
    ],
    ids=str,
)
def test_devices_that_contradict_the_mode_are_refused(
    settings: dict[str, Any], training: list[torch.device], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        Placement(**settings).replicas(training)


@pytest.mark.parametrize(
    ("settings", "training", "replicas"),
    [
        ({}, [CPU], [CPU]),
        ({}, [torch.device("cuda")], [CUDA0]),
        ({}, [CUDA0, CUDA1], [CUDA0, CUDA1]),
        ({"rollout_devices": ["cpu", "cpu"]}, [CPU], [CPU, CPU]),
        ({"mode": "disaggregated", "rollout_devices": ["cuda:1"]}, [CUDA0], [CUDA1]),
        ({"mode": "disaggregated", "rollout_devices": ["cpu"]}, [CPU], [CPU]),
        ({"mode": "hybrid", "rollout_devices": ["cuda:0", "cuda:1"]}, [CUDA0], [CUDA0, CUDA1]),
        ({"mode": "hybrid", "rollout_devices": ["cpu", "cpu"]}, [CPU], [CPU, CPU]),
    ],
    ids=str,
)
def test_there_is_a_replica_on_each_rollout_device(
    settings: dict[str, Any], training: list[torch.device], replicas: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Placement(**settings).replicas(training) == replicas
