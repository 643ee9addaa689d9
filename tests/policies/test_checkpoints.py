"""A checkpoint of another layout loads whole under its key map, or is refused with what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vla_async.policies.checkpoints import Mismatch, TensorFiles, find_checkpoint, load_mapped

KEY_MAP = [(r"^model\.", ""), (r"^head\.", "out."), (r"^unused\..*", "")]


class Model(nn.Module):
    """Two layers, a buffer that is saved and one that is not."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def release() -> dict[str, Tensor]:
    """What a public checkpoint of ``Model`` holds, under its own names."""
    shapes = {"model.body.weight": (4, 3), "model.body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,), "scale": (2,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_every_tensor_lands_under_its_mapped_name():
    """A wrong target or order of the map would leave random weights behind."""
    model, tensors = Model(), release()
    report = load_mapped(model, tensors, KEY_MAP)
    assert report.complete
    assert set(report.loaded) == {"body.weight", "body.bias", "out.weight", "out.bias", "scale"}
    assert torch.equal(model.body.weight, tensors["model.body.weight"])
    assert torch.equal(model.out.bias, tensors["head.bias"])
    assert torch.equal(model.scale, tensors["scale"])


def test_what_the_map_leaves_out_is_reported_but_does_not_count():
    """A head that only pre-training needs must not make a checkpoint unloadable."""
    report = load_mapped(Model(), release() | {"unused.lm_head": torch.ones(9)}, KEY_MAP)
    assert report.complete
    assert report.left_out == ("unused.lm_head",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head.weight": None}, "1 missing: out.weight"),
        ({"critic.weight": torch.ones(1)}, "1 unexpected: critic.weight"),
        ({"head.weight": torch.ones(5, 4)}, r"1 mismatched: out.weight \(the model has \[2, 4\], the checkpoint \[5, 4\]\)"),
    ],
)
def test_a_partial_fit_is_refused_by_name_and_changes_nothing(change: dict[str, Tensor | None], says: str):
    """A refusal after half of the tensors were written would leave a model that is neither."""
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in (release() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=says):
        load_mapped(model, tensors, KEY_MAP)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_partial_load_that_was_asked_for_says_what_it_left():
    """With ``partial`` the fitting rest is loaded, and the report still lists everything else."""
    model, tensors = Model(), release()
    del tensors["scale"]
    tensors["head.bias"] = torch.ones(7)
    tensors["other"] = torch.ones(1)
    report = load_mapped(model, tensors, KEY_MAP, partial=True)
    assert (report.missing, report.unexpected) == (("scale",), ("other",))
    assert report.mismatched == (Mismatch("out.bias", (2,), (7,)),)
    assert not report.complete
    assert torch.equal(model.out.weight, tensors["head.weight"])


def test_a_map_that_fits_nothing_is_refused_even_if_partial():
    """A typing error in the map would otherwise pass as a very partial load."""
    with pytest.raises(ValueError, match="0 tensors loaded"):
        load_mapped(Model(), {"x": torch.ones(1)}, KEY_MAP, partial=True)


def test_a_tied_weight_is_there_if_one_of_its_names_is():
    """Safetensors stores a shared tensor once, so the other name must not be reported as missing."""
    model = Model()
    model.twin = nn.Linear(3, 4)
    model.twin.weight = model.body.weight
    model.twin.bias = model.body.bias
    tensors = release()
    assert load_mapped(model, tensors, KEY_MAP).complete
    assert torch.equal(model.twin.weight, tensors["model.body.weight"])


def test_two_names_for_one_tensor_must_agree():
    """Which of two different tensors is loaded must not depend on the order of the file."""
    tensors = release()
    assert load_mapped(Model(), tensors | {"body.bias": tensors["model.body.bias"].clone()}, KEY_MAP).complete
    with pytest.raises(ValueError, match=r"model.body.bias of the checkpoint differ, but both are meant for body.bias"):
        load_mapped(Model(), tensors | {"body.bias": torch.zeros(4)}, KEY_MAP)


def test_numbers_are_cast_to_the_types_of_the_model():
    """A float32 release must load into a bfloat16 model without changing its type."""
    model = Model().to(torch.bfloat16)
    load_mapped(model, release(), KEY_MAP)
    assert model.body.weight.dtype == torch.bfloat16
    assert torch.equal(model.body.weight, release()["model.body.weight"].to(torch.bfloat16))


def _write_shards(folder: Path) -> None:
    tensors = release()
    parts = {"a.safetensors": list(tensors)[:2], "b.safetensors": list(tensors)[2:]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["file", "folder", "shards", "index"])
def test_safetensors_load_from_a_file_a_folder_and_shards(tmp_path: Path, layout: str):
    """Each way in which releases come must give the same weights."""
    path = tmp_path
    if layout in ("shards", "index"):
        _write_shards(tmp_path)
    else:
        save_file(release(), tmp_path / "model.safetensors")
        save_file({"mean": torch.ones(1)}, tmp_path / "normalizer.safetensors")  # statistics beside the weights
    if layout in ("file", "index"):
        path = tmp_path / ("model.safetensors" if layout == "file" else "model.safetensors.index.json")
    model = Model()
    assert load_mapped(model, path, KEY_MAP).complete
    assert torch.equal(model.body.weight, release()["model.body.weight"])
    assert TensorFiles(path).shape("head.weight") == (2, 4)


def test_paths_that_hold_no_clear_checkpoint_are_refused(tmp_path: Path):
    """Each wrong path must say what is wrong with it."""
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        TensorFiles(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="no safetensors file in"):
        TensorFiles(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        TensorFiles(tmp_path / "weights.bin")
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"pointer\.safetensors is no safetensors file, or not all of one"):
        TensorFiles(tmp_path / "pointer.safetensors")
    (tmp_path / "pointer.safetensors").unlink()
    for name in ("one", "two"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="give the path of the one that is meant"):
        TensorFiles(tmp_path)
    _write_shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names b\.safetensors, which is not there"):
        TensorFiles(tmp_path)


def test_a_name_that_is_neither_path_nor_on_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a network the error must name the setting, not the network's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"model\.pretrained='someone/nothing-at-all' is no local path"):
        find_checkpoint("someone/nothing-at-all")
    assert find_checkpoint(str(tmp_path)) == tmp_path
