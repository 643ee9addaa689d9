"""``vla-async export``: a trained policy as a folder in the layout of its public release.

::

   model.safetensors    the weights, with low-rank additions added up (several files and an index for a large model)
   config.json          the sizes, as the release says them
   policy_*             LeRobot's processors, for a policy in LeRobot's layout
   model.yaml           a section ``model`` that loads the folder, to be given as a second ``--config``

The critic, and what only exploration needs, stay behind: a release has no place for them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import nn

from vla_async.ablation import resolve
from vla_async.lerobot_processors import write_processors
from vla_async.options import OptionParser
from vla_async.policies.adapters import merged_weights
from vla_async.policies.base import VLAPolicy
from vla_async.policies.layouts import fuse
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.processing import Normalizer
from vla_async.policies.release_layouts import layout_of
from vla_async.policies.released import ReleasedFlowPolicy
from vla_async.run_directory import resolve_checkpoint
from vla_async.state import plain_hyper_parameters

_STATE_FILE = "proprio_projector"  # OpenVLA-OFT keeps it apart


def export_policy(policy: VLAPolicy, directory: Path) -> None:
    """Write a built policy in the layout of its release.

    Args:
        policy: with its weights.
        directory: a new or empty folder.

    Raises:
        ValueError: if the policy has no such layout, or no tokenizer that others could use.
        FileExistsError: if the folder has files.
    """
    layout, settings = layout_of(policy), _settings(policy, directory)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; give a new folder as --directory")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = layout.rename(merged_weights(cast(nn.Module, policy.network)))
    if isinstance(policy, OpenVLAOFTPolicy):
        tensors = fuse(tensors)
        beside = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_STATE_FILE)}
        if beside:
            names = {name.removeprefix(f"{_STATE_FILE}."): tensor for name, tensor in beside.items()}
            _save(names, directory / f"{_STATE_FILE}.safetensors")
    _save_weights(tensors, directory, in_one_file=layout.is_lerobots)
    (directory / "config.json").write_text(json.dumps(layout.config, indent=2, default=str) + "\n")
    if layout.is_lerobots:
        write_processors(cast(ReleasedFlowPolicy, policy), layout, settings["tokenizer"], directory)
    name = f"{type(policy).__module__}.{type(policy).__qualname__}"
    section = {"model": {"class_path": name, "init_args": settings}}
    (directory / "model.yaml").write_text(yaml.safe_dump(section, sort_keys=False))


def _settings(policy: VLAPolicy, directory: Path) -> dict[str, Any]:
    """What makes the same policy of the folder: the settings it was made with, and its statistics."""
    options = plain_hyper_parameters(policy)
    tokenizer = options["tokenizer"] or options["pretrained"]
    if tokenizer is None:
        raise ValueError(
            "the policy hashes words, which nobody who loads the export could do; it has to be trained with model.tokenizer"
        )
    if Path(tokenizer).exists():
        tokenizer = str(Path(tokenizer).resolve())
    kept = {name: value for name, value in options.items() if name != "lora"}  # the weights are whole
    if "dataset" in kept:
        kept["dataset"] = None  # said, for the recipe's would stay, and the statistics would be given twice
    return kept | _statistics(policy) | {"pretrained": str(directory.resolve()), "tokenizer": tokenizer}


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file), {"format": "pt"})


def _save_weights(tensors: dict[str, torch.Tensor], directory: Path, in_one_file: bool) -> None:
    """In one file, for LeRobot reads no other; else in several if they are large, for transformers reads those sooner."""
    if in_one_file:
        _save(tensors, directory / "model.safetensors")
    else:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, directory)


def _normalizers(policy: Any) -> dict[str, Normalizer]:
    actions = policy.bins.normalizer if isinstance(policy, OpenVLAOFTPolicy) else policy.action_normalizer
    state = getattr(policy, "state_normalizer", None)
    return {"action_statistics": actions} | ({} if state is None else {"state_statistics": state})


def _statistics(policy: Any) -> dict[str, Any]:
    """What normalises now, given or measured, whatever it came from: each is an offset and a scale."""
    return {
        name: {"mode": "mean_std", "mean": part.offset.tolist(), "std": part.scale.tolist(), "eps": 0.0}
        for name, part in _normalizers(policy).items()
    }


def export(args: Sequence[str]) -> Path:
    """Carry out ``vla-async export ARGS``.

    Raises:
        ConfigError: if the command line or the recipe is wrong.
        FileNotFoundError: if there is no such checkpoint.
    """
    usage = "vla-async export --config FILE --directory OUT [--ckpt_path FILE|last|best] [--SECTION.KEY VALUE ...]"
    parser = OptionParser(usage, __doc__)
    parser.add_argument("--directory", type=Path, required=True, help="a new folder")
    parser.add_argument("--ckpt_path", default="last", help="the checkpoint: a file, or last or best of the recipe's name")
    options, rest = parser.parse_known_args(args)
    config = resolve(rest)
    path = resolve_checkpoint(options.ckpt_path, Path(config["trainer"]["root_dir"]), config["trainer"]["name"])
    module, _, name = config["model"]["class_path"].rpartition(".")
    kind: type[VLAPolicy] = getattr(importlib.import_module(module), name)
    policy = kind.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    export_policy(policy, options.directory)
    print(f"{path} as {name}: {options.directory}\nload it with --config {options.directory / 'model.yaml'}")
    directory: Path = options.directory
    return directory
