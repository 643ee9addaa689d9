"""Small encoders: observations in, a feature vector out."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def symlog(x: Tensor) -> Tensor:
    """``sign(x) log(1 + |x|)``: the identity near zero, and a velocity of 100 becomes a 5."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def hash_words(text: str, vocab_size: int, max_words: int) -> Tensor:
    """Turn each word into a number without a vocabulary file: its CRC-32, folded into ``[1, vocab_size)``.

    Args:
        text: an instruction; case and punctuation are ignored.
        vocab_size: number of embeddings, of which 0 is padding.
        max_words: L.

    Returns:
        int64 ``[L]``, padded with 0.

    Raises:
        ValueError: if the text has more than ``max_words`` words.
    """
    words = re.findall(r"[^\W_]+", text.lower())
    if len(words) > max_words:
        raise ValueError(f"the instruction {text!r} has {len(words)} words, more than model.max_words={max_words}; raise it")
    ids = [1 + zlib.crc32(word.encode()) % (vocab_size - 1) for word in words]
    return torch.tensor(ids + [0] * (max_words - len(ids)), dtype=torch.int64)


def mlp(sizes: Sequence[int], output_gain: float) -> nn.Sequential:
    """Linear layers with tanh between them, orthogonally initialised; ``output_gain`` scales the last one."""
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        is_last = index == len(sizes) - 2
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, output_gain if is_last else 2.0**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if is_last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


class KeypointEncoder(nn.Module):
    """Where things are in an image, for any image size: convolutions, then a spatial softmax.

    Each of the last feature maps becomes the expected position of its activation and its mean, so that the output tells
    places, which manipulation needs, with a few thousand parameters (Levine et al., arXiv 1504.00702).

    Args:
        channels: C of the images.
        dim: length of the feature vector.
    """

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
        )  # fmt: skip
        self.project = nn.Linear(3 * 32, dim)

    def forward(self, image: Tensor) -> Tensor:
        """uint8 ``[*B, C, H, W]`` to float ``[*B, dim]``."""
        batch = image.shape[:-3]
        pixels = image.reshape(-1, *image.shape[-3:]).to(self.project.weight.dtype) / 127.5 - 1.0
        maps = self.convolutions(pixels)
        weights = torch.softmax(maps.flatten(2), dim=-1).reshape(maps.shape)
        rows = torch.linspace(-1.0, 1.0, maps.shape[-2], device=maps.device, dtype=maps.dtype)
        columns = torch.linspace(-1.0, 1.0, maps.shape[-1], device=maps.device, dtype=maps.dtype)
        y, x = (weights.sum(-1) * rows).sum(-1), (weights.sum(-2) * columns).sum(-1)
        features: Tensor = self.project(torch.cat([y, x, symlog(maps.mean((-2, -1)))], dim=-1))
        return torch.tanh(features).reshape(*batch, -1)


class ObservationEncoder(nn.Module):
    """State, cameras and instruction side by side in one vector of length ``dim``.

    Args:
        state_dim: length of the state, or None without one.
        cameras: name of each camera to its number of channels.
        image_dim: features per camera.
        vocab_size: number of word embeddings.
        instruction_dim: length of a word embedding.
    """

    def __init__(
        self, state_dim: int | None, cameras: Mapping[str, int], image_dim: int, vocab_size: int, instruction_dim: int
    ) -> None:
        super().__init__()
        self.has_state = state_dim is not None
        self.cameras = nn.ModuleDict({name: KeypointEncoder(channels, image_dim) for name, channels in cameras.items()})
        self.words = nn.Embedding(vocab_size, instruction_dim, padding_idx=0)
        self.dim = (state_dim or 0) + len(cameras) * image_dim + instruction_dim

    def forward(self, observation: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Observations by name, each ``[*B, ...]`` and the state normalised, and int64 tokens ``[*B, L]``."""
        features = [symlog(observation["state"])] if self.has_state else []
        features += [encoder(observation[name]) for name, encoder in self.cameras.items()]
        # the padding's embedding is zero, so a sum over L is a sum over words
        number = (tokens != 0).sum(-1, keepdim=True).clamp(min=1)
        features.append(self.words(tokens).sum(-2) / number)
        return torch.cat(features, dim=-1)
