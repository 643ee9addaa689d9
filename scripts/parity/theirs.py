"""LeRobot 0.6's side: π0, π0.5 and SmolVLA. Runs in the environment of LeRobot, from the root of the repository."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from parity import cases

Visited = list[tuple[Tensor, Tensor, Tensor]]


def write_case(folder: Path, tensors: dict[str, Tensor], visited: Visited) -> None:
    """Store inputs and outputs: ``visited`` is x_t ``[B, H', A']``, the time ``[B]`` and the velocity, by denoising step."""
    x_t, times, velocity = (torch.stack(parts) for parts in zip(*visited, strict=True))
    made = {**tensors, "x_t": x_t, "times": times, "velocity": velocity}
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / "case.safetensors")


@contextmanager
def recorded(module: Any) -> Iterator[Visited]:
    """Note what a policy's denoising loop visits."""
    visited: Visited = []
    integrate = module.euler_integrate

    def recording(field: Callable[[Tensor, Tensor], Tensor], *arguments: Any, **options: Any) -> Tensor:
        def noting(x_t: Tensor, time: Tensor) -> Tensor:
            velocity = field(x_t, time)
            visited.append((x_t.clone(), time.clone(), velocity.clone()))
            return velocity

        made: Tensor = integrate(noting, *arguments, **options)
        return made

    with mock.patch.object(module, "euler_integrate", recording):
        yield visited


def features() -> dict[str, Any]:
    """What the policies of LeRobot are told of the envs."""
    from lerobot.configs import FeatureType, PolicyFeature  # type: ignore[import-not-found]

    inputs = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, shape) for name, shape in cases.CAMERAS.items()
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (cases.STATE_DIM,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (cases.ACTION_DIM,))}
    sizes = {"max_state_dim": cases.MAX_STATE_DIM, "max_action_dim": cases.MAX_ACTION_DIM, "chunk_size": cases.HORIZON}
    return {"input_features": inputs, "output_features": outputs, "n_action_steps": cases.HORIZON, "device": "cpu"} | sizes


@contextmanager
def tiny_pi(module: Any) -> Iterator[None]:
    """Let the networks of π0 or π0.5 be made tiny: LeRobot has two fixed sizes only, so its own are replaced meanwhile."""
    text, expert = cases.PI_TEXT, cases.PI_EXPERT

    def variant(kind: str) -> Any:
        sizes = {"gemma_2b": text, "gemma_300m": expert}[kind]
        return module.GemmaConfig(
            sizes["hidden_size"],
            sizes["num_hidden_layers"],
            sizes["intermediate_size"],
            sizes["num_attention_heads"],
            sizes["num_key_value_heads"],
            sizes["head_dim"],
        )

    def shrunk(network: Any) -> Callable[..., Any]:
        def make(config: Any) -> Any:
            if hasattr(config, "vision_config"):
                for key, value in (cases.PI_VISION | {"projection_dim": text["hidden_size"]}).items():
                    setattr(config.vision_config, key, value)
                config.projection_dim = config.hidden_size = text["hidden_size"]
                config.image_token_id = cases.VOCAB_SIZE - 1
            getattr(config, "text_config", config).vocab_size = cases.VOCAB_SIZE
            return network(config=config)

        return make

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "get_gemma_config", variant))
        for network in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"):
            stack.enter_context(mock.patch.object(module, network, shrunk(getattr(module, network))))
        yield


def make_pi(name: str, module: Any, folder: Path) -> Any:
    """A tiny π0 or π0.5."""
    size = cases.PI_VISION["image_size"]
    # LeRobot knows a third camera that the envs do not have: it shows black and is masked out
    config = getattr(importlib.import_module(f"lerobot.policies.{name}"), f"{name.upper()}Config")(
        num_inference_steps=cases.NUM_STEPS, image_resolution=(size, size), empty_cameras=1, **features()
    )
    with tiny_pi(module):
        return getattr(module, f"{name.upper()}Policy")(config)


def tie_words(paligemma: Any) -> None:
    """Give the output layer, which nothing reads, the embedding's weights; LeRobot does not tie the two."""
    with torch.no_grad():
        paligemma.lm_head.weight.copy_(paligemma.model.language_model.embed_tokens.weight)


def make_smolvla(name: str, module: Any, folder: Path) -> Any:
    """A tiny SmolVLA, whose VLM is described by a folder as the hub has it."""
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    vlm = folder / "vlm"
    text = {"model_type": "llama", "num_hidden_layers": cases.SMOLVLA_LAYERS, **cases.SMOLVLA_TEXT}
    SmolVLMConfig(
        text_config=text, vision_config=cases.SMOLVLA_VISION, scale_factor=cases.SMOLVLA_SCALE_FACTOR, image_token_id=3
    ).save_pretrained(vlm)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(vlm)
    size = cases.SMOLVLA_VISION["image_size"]
    config = importlib.import_module("lerobot.policies.smolvla.configuration_smolvla").SmolVLAConfig(
        vlm_model_name=str(vlm),
        num_vlm_layers=cases.SMOLVLA_LAYERS,
        num_steps=cases.NUM_STEPS,
        resize_imgs_with_padding=(size, size),
        **features(),
    )
    return module.SmolVLAPolicy(config)


def make_processors(name: str, config: Any, tokenizer: Path) -> tuple[Any, Any]:
    """LeRobot's processors of raw observations and of actions, with our tokenizer in the place of the hub's."""
    module = importlib.import_module(f"lerobot.policies.{name}.processor_{name}")
    step = module.TokenizerProcessorStep

    def local(**options: Any) -> Any:
        return step(**{**options, "tokenizer_name": str(tokenizer)})

    statistics = {
        feature: {kind: torch.tensor(values) for kind, values in numbers.items()}
        for feature, numbers in cases.STATISTICS.items()
    }
    with mock.patch.object(module, "TokenizerProcessorStep", local):
        made: tuple[Any, Any] = getattr(module, f"make_{name}_pre_post_processors")(config, statistics)
    return made


def run(name: str) -> None:
    """Write a checkpoint, inputs and outputs of one policy."""
    folder = cases.FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cases.write_tokenizer(folder / "tokenizer", bos=name != "smolvla")
    module = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    policy = (make_smolvla if name == "smolvla" else make_pi)(name, module, folder)
    cases.randomize(policy)
    if name != "smolvla":
        tie_words(policy.model.paligemma_with_expert.paligemma)
    policy.eval()
    checkpoint = folder / "checkpoint"
    policy.save_pretrained(checkpoint)
    preprocess, postprocess = make_processors(name, policy.config, folder / "tokenizer")
    preprocess.save_pretrained(checkpoint)

    answer(module, policy, preprocess, postprocess, folder)


def answer(module: Any, policy: Any, preprocess: Any, postprocess: Any, folder: Path) -> None:
    """Write the inputs, and what LeRobot makes of them."""
    seen = cases.observations(cases.CAMERAS)
    batch: dict[str, Any] = {f"observation.images.{camera}": seen[camera].float() / 255.0 for camera in cases.CAMERAS}
    batch |= {"observation.state": seen["state"], "task": cases.instructions()}
    with recorded(module) as visited, torch.no_grad():
        made = policy.predict_action_chunk(preprocess(batch), noise=seen["noise"])
    actions = torch.stack([postprocess(action) for action in made.unbind(1)], dim=1)
    write_case(folder, seen | {"chunk": made, "actions": actions}, visited)
    said = {"instructions": cases.instructions(), "with": versions("lerobot", "transformers", "torch")}
    (folder / "case.json").write_text(json.dumps(said, indent=1))


def versions(*packages: str) -> str:
    """The installed versions of packages, in words."""
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in packages)


if __name__ == "__main__":
    for model in sys.argv[1:] or ("pi0", "pi05", "smolvla"):
        run(model)
