"""What both sides of the comparison know: sizes, observations and where the files lie. Needs torch only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(".parity-venv/cases")
MODELS = ("pi0", "pi05", "smolvla", "groot")
EXPORTED = ("pi05", "smolvla", "groot")  # π0 is exported in the layout of transformers
EXPORT, ANSWERS = "export", "exported"  # in a model's folder: what we wrote, and what LeRobot makes of it
TOLERANCE = 1e-4
SENSITIVITY = 20 * TOLERANCE  # each input has to change the velocity by this share, else equal numbers say nothing of it

STATE_DIM, ACTION_DIM, HORIZON, NUM_STEPS = 5, 3, 6, 4
MAX_STATE_DIM, MAX_ACTION_DIM = 8, 6
ACTION_LOW, ACTION_HIGH = (-1.0, -2.0, 0.0), (1.0, 2.0, 0.5)
# smaller than what the models see, so that they are scaled and padded
CAMERAS = {"image": (3, 20, 24), "wrist": (3, 16, 16)}
ROWS = ("all of the first", "another image", "another state", "another instruction", "another noise")
INSTRUCTIONS = ("push the cube", "open the top drawer")
VOCAB_SIZE = 320

STATISTICS = {
    "observation.state": {
        "mean": [0.1, -0.2, 0.0, 0.3, -0.1],
        "std": [1.0, 0.5, 2.0, 1.5, 0.8],
        "min": [-3.0, -2.0, -5.0, -4.0, -2.5],
        "max": [3.0, 2.5, 5.0, 4.5, 2.0],
        "q01": [-2.5, -1.5, -4.0, -3.5, -2.0],
        "q99": [2.5, 2.0, 4.0, 4.0, 1.5],
    },
    "action": {
        "mean": [0.1, -0.3, 0.2],
        "std": [0.4, 0.9, 0.1],
        "min": [-0.9, -1.9, 0.0],
        "max": [0.8, 1.8, 0.5],
        "q01": [-0.7, -1.5, 0.05],
        "q99": [0.6, 1.4, 0.45],
    },
}

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
PI_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PI_TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    **_HEADS,
}
PI_EXPERT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **_HEADS}

SMOLVLA_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SMOLVLA_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5,
}  # fmt: skip
SMOLVLA_SCALE_FACTOR, SMOLVLA_LAYERS = 2, 4

GROOT_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
GROOT_TEXT: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
GROOT_HEAD: dict[str, Any] = {
    "hidden_size": 20, "num_target_vision_tokens": 2, "max_num_embodiments": 4, "max_state_dim": MAX_STATE_DIM,
    "action_dim": MAX_ACTION_DIM, "action_horizon": HORIZON,
}  # fmt: skip
GROOT_ROBOT, GROOT_EMBODIMENT = "so100", 2
GROOT_IMAGE_SIZE = (3, 28, 28)

_SPECIAL = ("<pad>", "<eos>", "<bos>")
_FRAME = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
_SMOLVLM = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")


def observations(cameras: dict[str, tuple[int, int, int]]) -> dict[str, Tensor]:
    """Observations and noise, of which each row changes one thing of the first (:data:`ROWS`).

    Args:
        cameras: shape of each camera's image.

    Returns:
        By camera uint8 ``[5, C, H, W]``; ``state`` float32 ``[5, STATE_DIM]``; ``noise`` ``[5, HORIZON, MAX_ACTION_DIM]``.
    """
    generator = torch.Generator().manual_seed(3)

    def rows(changed: int, first: Tensor, other: Tensor) -> Tensor:
        return torch.stack([other if row == changed else first for row in range(len(ROWS))])

    made = {}
    for name, shape in cameras.items():
        made[name] = rows(1, *torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=generator))
    made["state"] = rows(2, *torch.randn(2, STATE_DIM, generator=generator))
    made["noise"] = rows(4, *torch.randn(2, HORIZON, MAX_ACTION_DIM, generator=generator))
    return made


def instructions() -> list[str]:
    """The instruction of each row."""
    return [INSTRUCTIONS[row == 3] for row in range(len(ROWS))]


def randomize(module: nn.Module, scale: float = 0.2, seed: int = 11) -> None:
    """Make every weight matter, also gates and scales that begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def write_tokenizer(folder: Path, bos: bool) -> None:
    """A tokenizer of single bytes, in the files that transformers reads.

    Args:
        folder: is made.
        bos: whether it begins a text with a token, as PaliGemma's does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *alphabet]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*_SPECIAL, *_FRAME, *_SMOLVLM)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    named: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    more = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    more |= {"end_of_utterance_token": "<end_of_utterance>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=more, **named).save_pretrained(str(folder))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest value of ``theirs``.

    Raises:
        ValueError: if the shapes differ, or a number is not finite.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: ours {list(ours.shape)}, theirs {list(theirs.shape)}")
    error = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
    if not math.isfinite(error):
        raise ValueError("a number is not finite, or all of theirs are zero")
    return error
