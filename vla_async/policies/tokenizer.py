"""Instructions as tokens: a pretrained tokenizer from files, or one that needs no files, for models with random weights.

An EnvWorker turns an instruction into numbers once per episode; a policy may need its text again later, to write the state
into the prompt. Such a policy carries the text as bytes (:func:`encode_text`), and makes the prompt per decision.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INSTRUCTION_LINE = "{instruction}\n"
"""π0's and SmolVLA's prompt."""
STATE_PROMPT = "Task: {instruction}, State: {state};\nAction: "
"""π0.5's prompt; the state as the numbers of its bins."""
ACTION_QUESTION = "In: What action should the robot take to {instruction}?\nOut:"
"""OpenVLA's prompt; see :func:`action_question`."""

_LLAMA_SPACE = 29871
_SPECIAL = {  # the usual names, for a file that does not say which it has
    "bos_token": ("<bos>", "<s>"),
    "eos_token": ("<eos>", "</s>"),
    "pad_token": ("<pad>", "<PAD>", "<|endoftext|>"),
}


def encode_text(text: str, max_bytes: int, setting: str = "max_bytes") -> Tensor:
    """A text as int64 ``[max_bytes]``: its UTF-8 bytes plus 1, padded with 0.

    Args:
        text: to be encoded.
        max_bytes: most bytes that it may have.
        setting: of the model, that says so.

    Raises:
        ValueError: if it has more bytes than ``max_bytes``.
    """
    data = text.encode()
    if len(data) > max_bytes:
        raise ValueError(
            f"the instruction {text!r} has {len(data)} bytes, but only {max_bytes} are kept; raise model.{setting}"
        )
    return torch.tensor([byte + 1 for byte in data] + [0] * (max_bytes - len(data)), dtype=torch.int64)


def decode_text(codes: Sequence[int]) -> str:
    """The inverse of :func:`encode_text`, of one row."""
    return bytes(code - 1 for code in codes if code != 0).decode()


class HashingTokenizer:
    """Words, digits and punctuation marks become numbers without a vocabulary: their CRC-32, folded into the vocabulary.

    0 is padding, 1 begins and 2 ends a text. Different words may get the same number.

    Args:
        vocab_size: number of tokens.
    """

    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 4:
            raise ValueError(f"vocab_size={vocab_size} leaves no token for words; use at least 4")
        self.vocab_size = vocab_size

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, without a beginning, an end or padding."""
        pieces = re.findall(r"\d|[^\W\d_]+|[^\w\s]|_|\n", text.lower())
        return [3 + zlib.crc32(piece.encode()) % (self.vocab_size - 3) for piece in pieces]


class PretrainedTokenizer:
    """The tokenizer that was released with a model, through transformers.

    Args:
        source: a folder or a ``tokenizer.json`` on this machine, or a hub id.
        pad_id: padding token, if the tokenizer names none.

    Raises:
        ValueError: if it cannot be read, or has no padding token and ``pad_id`` is not given.
    """

    def __init__(self, source: str | Path, pad_id: int | None = None) -> None:
        tokenizer = _load(str(source))
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        self.vocab_size: int = len(tokenizer)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        padding = tokenizer.pad_token_id if pad_id is None else pad_id
        if padding is None:
            raise ValueError(
                f"the tokenizer {str(source)!r} names no padding token; give its folder, where tokenizer_config.json does"
            )
        self.pad_id: int = padding

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, without a beginning, an end or padding."""
        return list(self._encode(text))


def _load(source: str) -> Any:
    from transformers import AutoTokenizer

    path = Path(source)
    try:
        return _from_file(source) if path.is_file() else AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        where = "on this machine" if path.exists() else "on this machine or the hub"
        raise ValueError(f"tokenizer={source!r} cannot be read {where}: {error}") from error


def _from_file(source: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(source)
    # those that it has: transformers would append others to the vocabulary, for which a model has no trained embedding
    known = {kind: [name for name in names if tokenizer.token_to_id(name) is not None] for kind, names in _SPECIAL.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{kind: names[0] for kind, names in known.items() if names})


class PromptTokenizer:
    """From an instruction to the tokens of a model's prompt, always ``max_length`` of them.

    Args:
        tokenizer: what turns text into tokens.
        max_length: L.
        template: the prompt, with ``{instruction}`` and, if the model reads the state as text, ``{state}``.
        bos: whether the prompt begins with the tokenizer's token for it.
        eos: whether it ends with the tokenizer's token for it.
        suffix: tokens that are appended to every prompt.
        lower: whether the instruction is put into lower case.
        setting: of the model, that says ``max_length``.

    Raises:
        ValueError: if the template has no instruction, or the tokenizer lacks the asked-for beginning or end.
    """

    def __init__(
        self,
        tokenizer: HashingTokenizer | PretrainedTokenizer,
        max_length: int,
        template: str = INSTRUCTION_LINE,
        *,
        bos: bool = True,
        eos: bool = False,
        suffix: Sequence[int] = (),
        lower: bool = False,
        setting: str = "max_tokens",
    ) -> None:
        if "{instruction}" not in template:
            raise ValueError(f"the template {template!r} has no {{instruction}}")
        for wanted, name in ((bos, "bos"), (eos, "eos")):
            if wanted and getattr(tokenizer, f"{name}_id") is None:
                raise ValueError(f"{name}=True, but the tokenizer has no such token; give another")
        self.tokenizer, self.max_length, self.template = tokenizer, max_length, template
        self.bos, self.eos, self.suffix, self.lower, self.setting = bos, eos, list(suffix), lower, setting

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def tokenize(self, instruction: str, state: Sequence[int] | None = None) -> Tensor:
        """The prompt's tokens, int64 ``[max_length]``, padded on the right.

        Args:
            instruction: as the env gives it; underscores and line breaks become spaces.
            state: bins of the state's elements, if the template has a ``{state}``.

        Raises:
            ValueError: if the prompt is longer than ``max_length``.
        """
        words = instruction.strip().replace("_", " ").replace("\n", " ")
        text = self.template.replace("{instruction}", words.lower() if self.lower else words)
        if "{state}" in self.template:
            if state is None:
                raise ValueError(f"the template {self.template!r} needs a state")
            text = text.replace("{state}", " ".join(str(bin_) for bin_ in state))
        ids = [self.tokenizer.bos_id] * self.bos + self.tokenizer(text) + self.suffix + [self.tokenizer.eos_id] * self.eos
        if len(ids) > self.max_length:
            raise ValueError(
                f"the prompt {text!r} has {len(ids)} tokens, more than {self.max_length}; raise model.{self.setting}"
            )
        return torch.tensor(ids + [self.pad_id] * (self.max_length - len(ids)), dtype=torch.int64)

    def with_state(self, codes: Tensor, bins: Tensor) -> Tensor:
        """The prompts of a batch whose states are known only now.

        Args:
            codes: int64 ``[B, max_bytes]``, the instructions by :func:`encode_text`.
            bins: int64 ``[B, D]``.

        Returns:
            int64 ``[B, max_length]`` on the codes' device.
        """
        rows = zip(codes.tolist(), bins.tolist(), strict=True)
        prompts = torch.stack([self.tokenize(decode_text(row), state) for row, state in rows])
        return prompts.to(codes.device)

    def mask(self, tokens: Tensor) -> Tensor:
        """Bool, true where a token is no padding."""
        return tokens != self.pad_id


def action_question(tokenizer: HashingTokenizer | PretrainedTokenizer, max_length: int) -> PromptTokenizer:
    """OpenVLA's prompts; with Llama's vocabulary they end, as in the release's training, with the token of a lone space."""
    suffix = [_LLAMA_SPACE] if tokenizer.vocab_size > _LLAMA_SPACE else []
    return PromptTokenizer(tokenizer, max_length, ACTION_QUESTION, lower=True, suffix=suffix, setting="max_prompt_tokens")
