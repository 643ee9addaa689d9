"""``PaliGemmaPolicy``: what ``Pi0Policy`` and ``Pi05Policy`` share, built on :mod:`vla_async.policies.paligemma`."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async.policies.checkpoints import cast_weights
from vla_async.policies.flow import Prefix
from vla_async.policies.images import resize_with_pad
from vla_async.policies.paligemma import PrefixCache, embed_images, run_prefix
from vla_async.policies.paligemma_release import PaliGemmaSizes, read_sizes
from vla_async.policies.released import Freeze, ReleasedFlowPolicy, Tokenizer, lerobot_statistics


class PaliGemmaPolicy(ReleasedFlowPolicy):
    """PaliGemma reads cameras and prompt, an action expert makes the flow. Build :class:`Pi0Policy` or :class:`Pi05Policy`.

    The releases saw up to three cameras, the base's before the wrists'. One that is left out is the same as one masked out.
    Its projections, before and after the expert, stay float32 whatever ``dtype`` is.
    """

    spare_tokens = 64  # PaliGemma's placeholder for images, and what rounds its vocabulary up
    release_keys: ClassVar[list[tuple[str, str]]]  # from the names of releases to those of the network

    @abstractmethod
    def make_model(self, config: Any) -> nn.Module:
        """The network with random weights, from a transformers ``PI0Config``."""

    @property
    @abstractmethod
    def vlm(self) -> Any:
        """The transformers ``PaliGemmaModel`` in the network."""

    @property
    @abstractmethod
    def expert(self) -> nn.Module:
        """The action expert in the network."""

    @property
    def sizes_class(self) -> type[PaliGemmaSizes]:
        return PaliGemmaSizes

    def read_release(self, folder: Path) -> dict[str, Any]:
        """Sizes of ``config.json``, and the statistics that LeRobot stores beside the weights."""
        file = folder / "config.json"
        modes = json.loads(file.read_text()).get("normalization_mapping", {}) if file.is_file() else {}
        return read_sizes(folder) | lerobot_statistics(folder, modes)

    def key_map(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The release's; its output layer, which nothing reads, only stands in for an embedding that is missing."""
        has_embedding = any(name.endswith("paligemma.model.language_model.embed_tokens.weight") for name in names)
        unread = [(r"^(model\.)?paligemma_with_expert\.paligemma\.(language_model\.)?lm_head\..*", "")]
        return [*(unread if has_embedding else []), *self.release_keys]

    def make_network(self, tokenizer: Tokenizer) -> nn.Module:
        return self.make_model(self.sizes.make_config())

    def cast_network(self, dtype: torch.dtype) -> None:
        """PaliGemma and the expert only: the flow enters and leaves in float32."""
        cast_weights(self.vlm, dtype)
        cast_weights(self.expert, dtype)

    def parts(self) -> dict[Freeze, list[nn.Module]]:
        return {"none": [], "vision": [self.vlm.vision_tower], "vlm": [self.vlm]}

    def dims(self) -> tuple[int, int]:
        return self.sizes.text_config["hidden_size"], self.sizes.expert_config["hidden_size"]

    def read_prefix(self, td: TensorDictBase, tokens: Tensor, state: Tensor | None) -> Prefix:
        """Let PaliGemma read the cameras and a prompt.

        Args:
            td: ``("observation", camera)`` uint8 ``[B, 3, H, W]``.
            tokens: int64 ``[B, L]``.
            state: the state token's ``[B, max_state_dim]``, if the suffix begins with one.
        """
        recompute, size = self.hparams["gradient_checkpointing"], self.sizes.vision_config["image_size"]
        shown = [td["observation", camera] for camera in self.cameras.sources if camera is not None]
        pixels = torch.stack([resize_with_pad(image, size, size) for image in shown], dim=1)
        images = embed_images(self.vlm, pixels.flatten(0, 1), recompute).unflatten(0, pixels.shape[:2]).flatten(1, 2)
        words = self.vlm.get_input_embeddings()(tokens)
        mask = torch.cat([tokens.new_ones(images.shape[:2], dtype=torch.bool), self.prompt.mask(tokens)], dim=1)
        embeddings = torch.cat([images.to(words.dtype), words], dim=1)
        features, layers = run_prefix(self.vlm, embeddings, mask, recompute)
        return Prefix(features, mask, PrefixCache(layers, mask, state))

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity_and_features(prefix, x_t, t)[0]
