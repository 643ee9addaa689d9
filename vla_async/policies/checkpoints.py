"""Weights of public releases: found on disk or on the Hugging Face hub, renamed by an explicit map, and loaded whole.

A checkpoint that fits only in part is refused: a policy that silently kept random weights trains, badly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["LoadReport", "Mismatch", "TensorFiles", "cast_weights", "find_checkpoint", "load_mapped"]

_SHOWN = 8  # names per group in an error; a real model has hundreds


class Mismatch(NamedTuple):
    """A tensor whose shape in the checkpoint is not the module's."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (the model has {list(self.expected)}, the checkpoint {list(self.found)})"


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a module and of a checkpoint.

    Attributes:
        loaded: names in the module.
        missing: names in the module that the checkpoint has nothing for.
        unexpected: names in the checkpoint, as they stand there, that the module has no place for.
        mismatched: names in the module, with both shapes.
        left_out: names in the checkpoint that the key map leaves out on purpose.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    left_out: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether module and checkpoint fit one another, but for what was left out on purpose."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for word in ("missing", "unexpected", "mismatched"):
            names: Sequence[object] = getattr(self, word)
            if names:
                shown = ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
                parts.append(f"{len(names)} {word}: {shown}")
        return "; ".join(parts)


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one or several safetensors files, read when asked for, so that no second copy of a model is in memory.

    Args:
        path: a ``.safetensors`` file, a ``.safetensors.index.json`` of a sharded checkpoint, or a folder with one of them.

    Raises:
        FileNotFoundError: if there is no such file, or a shard is missing.
        ValueError: if a folder leaves open which file is meant, or a file is not safetensors.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._files = {}
        for file in _weight_files(path):
            if not file.is_file():
                raise FileNotFoundError(f"the checkpoint {path} names {file.name}, which is not there; fetch it again whole")
            try:
                opened = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{file} is no safetensors file, or not all of one (a Git LFS pointer?); fetch it again whole: {error}"
                ) from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files behind a path, see :class:`TensorFiles`."""
    if path.is_dir():
        indices, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
        # the usual name first: a release may keep statistics in further safetensors files beside it
        usual = [path / "model.safetensors.index.json", path / "model.safetensors"]
        found = [file for file in usual if file.is_file()] or indices or files
        if not found:
            raise FileNotFoundError(f"no safetensors file in {path}; convert other formats with safetensors.torch.save_file")
        if found[0] not in usual and len(found) > 1:
            raise ValueError(f"{path} holds {[file.name for file in found]}; give the path of the one that is meant")
        return _weight_files(found[0])
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.name.endswith(".index.json"):
        return [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is not a safetensors file; convert it with safetensors.torch.save_file")
    return [path]


def find_checkpoint(name: str) -> Path:
    """The folder or file of a checkpoint, fetched from the Hugging Face hub if it is not a local path.

    Args:
        name: a local path, or a hub id like ``lerobot/pi0_base``.

    Raises:
        FileNotFoundError: if it is neither, or cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(f"model.pretrained={name!r} is no local path, and the hub gives nothing: {error}") from error


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the type of a network's weights, but not of rotary frequencies, which bfloat16 is too coarse for."""
    frequencies = {name: buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    module.to(dtype)
    for name, buffer in frequencies.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, buffer)


def _places(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name; tied ones under each of their names."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    kept = module.state_dict().keys()
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _rename(name: str, key_map: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in key_map:
        name = re.sub(pattern, replacement, name)
    return name


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return tensors.shape(name) if isinstance(tensors, TensorFiles) else tuple(tensors[name].shape)


def _targets(
    source: Mapping[str, Tensor], places: Mapping[str, Tensor], key_map: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """For each name of a checkpoint its name in the module: empty if left out, itself unknown there if unexpected."""
    targets: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in source:
        target = _rename(name, key_map)
        other = first.setdefault(target, name)
        if target in places and other != name and not torch.equal(source[name], source[other]):
            raise ValueError(f"{name} and {other} of the checkpoint differ, but both are meant for {target}")
        targets[name] = target
    return targets


def load_mapped(
    module: nn.Module,
    tensors: Mapping[str, Tensor] | Path,
    key_map: Sequence[tuple[str, str]],
    *,
    partial: bool = False,
) -> LoadReport:
    """Load a checkpoint whose tensors have other names, and say what became of each.

    Nothing is written before everything is known to fit. Numbers are cast to the module's type. A tied weight is there if
    any of its names is.

    Args:
        module: is filled in place.
        tensors: by their names in the checkpoint; or the path of safetensors, see :class:`TensorFiles`.
        key_map: pairs of a regular expression and its replacement, all applied in order to each name of the checkpoint
            (``re.sub``). A name that becomes empty is left out on purpose.
        partial: load what fits, and leave the rest of the module as it is.

    Raises:
        ValueError: if something is missing, unexpected or of another shape, unless ``partial``; if nothing fits at all; or
            if two different tensors map to the same name.
        FileNotFoundError: if there is no checkpoint at the path.
    """
    source = TensorFiles(tensors) if isinstance(tensors, Path) else tensors
    places = _places(module)
    targets = _targets(source, places, key_map)
    found = {target: name for name, target in targets.items() if target in places}
    shapes = {target: _shape(source, name) for target, name in found.items()}
    filled = {id(places[target]) for target in found}
    report = LoadReport(
        loaded=tuple(name for name in found if shapes[name] == places[name].shape),
        missing=tuple(name for name, tensor in places.items() if id(tensor) not in filled),
        unexpected=tuple(name for name, target in targets.items() if target and target not in places),
        mismatched=tuple(
            Mismatch(name, tuple(places[name].shape), shapes[name]) for name in found if shapes[name] != places[name].shape
        ),
        left_out=tuple(name for name, target in targets.items() if not target),
    )
    if not report.loaded or not (partial or report.complete):
        raise ValueError(f"the checkpoint does not fit the model, so nothing was loaded: {report}")
    with torch.no_grad():
        for name in report.loaded:
            places[name].copy_(source[found[name]])
    return report
