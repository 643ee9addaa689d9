"""LeRobot's processors of an exported policy: what normalises and what writes the prompt, in the files that LeRobot loads.

LeRobot keeps a policy's processing apart from its weights, as two lists of steps by name: ``policy_preprocessor.json`` and
``policy_postprocessor.json``, with the statistics in files of their own. Named are steps that LeRobot 0.4 and later have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_async.policies.layouts import Layout
from vla_async.policies.processing import Normalizer
from vla_async.policies.released import ReleasedFlowPolicy

_EPS = 1e-8  # LeRobot adds so much to a deviation
_NORMALIZER, _UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"


def write_processors(policy: ReleasedFlowPolicy, layout: Layout, tokenizer: str, directory: Path) -> None:
    """Write the processors and the statistics beside the weights.

    Args:
        policy: built; its statistics are written, measured ones too.
        layout: its ``config`` is LeRobot's.
        tokenizer: a folder, a ``tokenizer.json`` or a hub id.
        directory: of the export.
    """
    config = layout.config
    outputs, mapping = config["output_features"], config["normalization_mapping"]
    features = {**config["input_features"], **outputs}
    path = Path(tokenizer)
    prompt = {
        # transformers wants the folder
        "tokenizer_name": str(path.parent) if path.is_file() else tokenizer,
        "max_length": config["tokenizer_max_length"],
        "padding": "max_length",
        "padding_side": "right",
    }
    before = [
        _step("rename_observations_processor", rename_map={}),
        _step("to_batch_processor"),
        _step(_NORMALIZER, eps=_EPS, features=features, norm_map=mapping),
        *(_step(name, **options) for name, options in layout.prompt_steps),
        _step("tokenizer_processor", **prompt),
        # LeRobot's programs put the policy's device here as they load it
        _step("device_processor", device="cpu"),
    ]
    after = [_step(_UNNORMALIZER, eps=_EPS, features=outputs, norm_map=mapping), _step("device_processor", device="cpu")]
    statistics = _statistics({"observation.state": policy.state_normalizer, "action": policy.action_normalizer})
    _write("policy_preprocessor", before, statistics, directory)
    _write("policy_postprocessor", after, statistics, directory)


def _step(name: str, **options: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": options}


def _statistics(normalizers: Mapping[str, Normalizer]) -> dict[str, torch.Tensor]:
    tensors = {f"{feature}.mean": part.offset for feature, part in normalizers.items()}
    return tensors | {f"{feature}.std": part.scale - _EPS for feature, part in normalizers.items()}


def _write(name: str, steps: list[dict[str, Any]], statistics: Mapping[str, torch.Tensor], directory: Path) -> None:
    """One pipeline, and the statistics of the steps that have some, in files named as LeRobot names them."""
    from safetensors.torch import save_file

    for index, step in enumerate(steps):
        if step["registry_name"] in (_NORMALIZER, _UNNORMALIZER):
            step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in statistics.items()}, directory / step["state_file"])
    (directory / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}, indent=2) + "\n")
