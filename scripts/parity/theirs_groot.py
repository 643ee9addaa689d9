"""LeRobot 0.4's side: GR00T N1.5, which later releases dropped. Runs in the environment of LeRobot 0.4."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity import cases
from parity.absent import do_without
from parity.theirs import Visited, versions, write_case

ABSENT = (
    "av", "datasets", "deepdiff", "imageio", "jsonlines", "pandas", "pyarrow", "pynput", "rerun", "serial", "wandb",
)  # fmt: skip
_ASSETS = "parity/eagle"
_HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def write_eagle_config(folder: Path) -> None:
    """The files beside the code of Eagle 2.5 that LeRobot fetches from the hub; only the sizes in them matter here."""
    for name in (
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer_config.json",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    config = {
        "model_type": "eagle_2_5_vl",
        "auto_map": {
            "AutoConfig": "configuration_eagle2_5_vl.Eagle25VLConfig",
            "AutoModel": "modeling_eagle2_5_vl.Eagle25VLForConditionalGeneration",
        },
        "vision_config": {"model_type": "siglip_vision_model", **cases.GROOT_VISION},
        "text_config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **cases.GROOT_TEXT, "rope_theta": 1e6},
        "select_layer": -1,
        "use_pixel_shuffle": False,
        "mlp_connector_layers": 1,
        "image_token_index": image_token(),
    }
    (folder / "config.json").write_text(json.dumps(config))


def tokenizer() -> Any:
    """The tokenizer of :func:`cases.write_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(cases.FOLDER / "groot" / "tokenizer")


def image_token() -> int:
    """Where the features of an image are put."""
    return int(tokenizer().convert_tokens_to_ids("<IMG_CONTEXT>"))


@contextmanager
def without_flash_attention() -> Iterator[None]:
    """Let the vision tower, for which LeRobot asks for flash attention, compute the same attention by PyTorch's.

    Flash attention exists for GPUs only.
    """
    from transformers import AutoModel
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    def from_config(config: Any, **unused: Any) -> Any:
        kind: Any = get_class_from_dynamic_module(config.auto_map["AutoModel"], config.name_or_path)
        config.vision_config._attn_implementation = "sdpa"
        config._attn_implementation = config.text_config._attn_implementation = "sdpa"
        return kind(config, vision_model=SiglipVisionModel(config.vision_config))

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def make_model() -> Any:
    """A tiny GR00T N1.5."""
    from lerobot.policies.groot.groot_n1 import GR00TN15, GR00TN15Config  # type: ignore[import-not-found]

    head = {"num_attention_heads": 2, "attention_head_dim": 8, "dropout": 0.2, "final_dropout": True}
    dit: dict[str, Any] = {"num_layers": 4, "output_dim": cases.GROOT_HEAD["hidden_size"], "interleave_self_attention": True}
    dit |= {"cross_attention_dim": cases.GROOT_TEXT["hidden_size"], "norm_type": "ada_norm", "positional_embeddings": None}
    context: dict[str, Any] = {
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "num_layers": 1,
        "positional_embeddings": None,
    }
    action_head = {
        **cases.GROOT_HEAD,
        "diffusion_model_cfg": head | dit,
        "vl_self_attention_cfg": head | context,
        "input_embedding_dim": 16,
        "backbone_embedding_dim": cases.GROOT_TEXT["hidden_size"],
        "num_inference_timesteps": cases.NUM_STEPS,
        "add_pos_embed": True,
        "use_vlln": True,
    }
    backbone = {
        "select_layer": cases.GROOT_TEXT["num_hidden_layers"],
        "tokenizer_assets_repo": _ASSETS,
        "project_to_dim": None,
    }
    config = GR00TN15Config(
        backbone_cfg=backbone,
        action_head_cfg=action_head,
        action_horizon=cases.HORIZON,
        action_dim=cases.MAX_ACTION_DIM,
    )
    with without_flash_attention():
        return GR00TN15(config, local_model_path="")


def eagle_inputs(images: list[Tensor], instruction: str) -> dict[str, Tensor]:
    """What the backbone reads of one decision: images uint8 ``[3, size, size]`` of the model's own size, and the prompt."""
    size = cases.GROOT_VISION["image_size"] // cases.GROOT_VISION["patch_size"]
    shown = "<IMG_CONTEXT>" * size**2
    frames = "".join(f"<image {number + 1}><img>{shown}</img>" for number in range(len(images)))
    ids = tokenizer()(f"{_HEAD}{frames}{[instruction]}{_TAIL}", return_tensors="pt").input_ids
    pixels = torch.stack(images).float() / 127.5 - 1.0
    sizes = torch.tensor([list(image.shape[-2:]) for image in images])
    return {
        "eagle_input_ids": ids,
        "eagle_attention_mask": torch.ones_like(ids),
        "eagle_pixel_values": pixels,
        "eagle_image_sizes": sizes,
    }


@contextmanager
def recorded(head: Any) -> Iterator[Visited]:
    """Note what the denoising loop visits, in our time and direction: from 1, noise, to 0, and noise minus action."""
    visited: Visited = []
    asked: list[tuple[Tensor, Tensor]] = []

    def note_question(module: Any, given: tuple[Tensor, ...]) -> None:
        asked.append((given[0].clone(), 1.0 - given[1].float() / head.num_timestep_buckets))

    def note_answer(module: Any, given: Any, made: Tensor) -> None:
        visited.append((*asked[-1], -made[:, -head.action_horizon :]))

    hooks = [
        head.action_encoder.register_forward_pre_hook(note_question),
        head.action_decoder.register_forward_hook(note_answer),
    ]
    yield visited
    for hook in hooks:
        hook.remove()


def decide(model: Any, inputs: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Visited]:
    """The chunk from this noise, and what the denoising loop visited."""
    with recorded(model.action_head) as visited, mock.patch.object(torch, "randn", return_value=noise):
        chunk: Tensor = model.get_action(inputs)["action_pred"]
    return chunk, visited


def run() -> None:
    """Write a checkpoint, inputs and outputs."""
    from lerobot.policies.groot.processor_groot import (  # type: ignore[import-not-found]
        GrootActionUnpackUnnormalizeStep,
        GrootPackInputsStep,
    )
    from lerobot.utils.constants import HF_LEROBOT_HOME  # type: ignore[import-not-found]

    folder = cases.FOLDER / "groot"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cases.write_tokenizer(folder / "tokenizer", bos=False)
    write_eagle_config(HF_LEROBOT_HOME / _ASSETS)
    model = make_model().eval()
    cases.randomize(model)
    model.save_pretrained(folder / "checkpoint")
    pack = GrootPackInputsStep(
        max_state_dim=cases.MAX_STATE_DIM,
        max_action_dim=cases.MAX_ACTION_DIM,
        embodiment_tag="ours",
        embodiment_mapping={"ours": cases.GROOT_EMBODIMENT},
        stats=cases.STATISTICS,
    )
    unpack = GrootActionUnpackUnnormalizeStep(env_action_dim=cases.ACTION_DIM, stats=cases.STATISTICS)
    answer(model, pack, unpack, folder)


def answer(model: Any, pack: Any, unpack: Any, folder: Path) -> None:
    """Write the inputs, and what LeRobot makes of them."""
    seen = cases.observations(dict.fromkeys(cases.CAMERAS, cases.GROOT_IMAGE_SIZE))
    chunks, paths = [], []
    for row, instruction in enumerate(cases.instructions()):  # alone: LeRobot attends to the padding of a batch
        packed = pack({"observation": {"observation.state": seen["state"][row : row + 1]}, "complementary_data": {}})
        inputs = eagle_inputs([seen[camera][row] for camera in cases.CAMERAS], instruction)
        inputs |= {"state": packed["observation"]["state"], "embodiment_id": packed["complementary_data"]["embodiment_id"]}
        chunk, visited = decide(model, inputs, seen["noise"][row : row + 1])
        chunks.append(chunk)
        paths.append(visited)
    steps = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*paths, strict=True)]
    chunk = torch.cat(chunks)
    actions = torch.stack([unpack({"action": action})["action"] for action in chunk.unbind(1)], dim=1)
    write_case(folder, seen | {"chunk": chunk[..., : cases.ACTION_DIM], "actions": actions}, steps)  # type: ignore[arg-type]
    said = {"instructions": cases.instructions(), "with": versions("lerobot", "transformers", "diffusers", "torch")}
    (folder / "case.json").write_text(json.dumps(said, indent=1))


def do_without_absent() -> None:
    """Before LeRobot is imported: stand in for what no network needs."""
    # these look which packages there are as they are imported, so they come first
    for package in ("diffusers.models.attention", "transformers.processing_utils"):
        importlib.import_module(package)
    do_without(*ABSENT)


if __name__ == "__main__":
    do_without_absent()
    run()
