"""``SmolVLAPolicy``: SmolVLA (Shukor et al., arXiv 2506.01844) on transformers' SmolVLM and Llama blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.policies.flow import Prefix
from vla_async.policies.images import resize_with_pad
from vla_async.policies.released import Freeze, ReleasedFlowPolicy, Tokenizer, lerobot_statistics
from vla_async.policies.tokenizer import INSTRUCTION_LINE, PromptTokenizer

if TYPE_CHECKING:
    from vla_async.policies.smolvla_network import SmolVLACache, SmolVLANetwork

KEY_MAP = [
    (r"^model\.(?!vlm_with_expert\.)", ""),
    (r"^model\.vlm_with_expert\.vlm\.model\.", "vlm."),
    (r"^model\.vlm_with_expert\.lm_expert\.", "expert."),
    (r"^vlm\.vision_model\.", "vision."),
    (r"^vlm\.connector\.", "connector."),
    (r"^vlm\.text_model\.embed_tokens\.", "embedding."),
    (r"^vlm\.text_model\.norm\.", "norm."),
    (r"^vlm\.text_model\.layers\.(\d+)\.", r"layers.\1.block."),
    (r"^expert\.layers\.(\d+)\.", r"expert_layers.\1.block."),
    (r"^expert\.norm\.", "expert_norm."),
    # it says no words
    (r"^(model\.vlm_with_expert\.vlm|expert)\.lm_head\..*", ""),
    (r"^(un)?normalize_(inputs|targets|outputs)\..*", ""),  # statistics are settings here
]
"""From the names of ``lerobot/smolvla_base`` to those of :class:`~vla_async.policies.smolvla_network.SmolVLANetwork`."""

_SIZES = {  # by their names in a release's config.json
    "chunk_size": "chunk_size",
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
    "num_vlm_layers": "num_vlm_layers",
    "expert_width_multiplier": "expert_width",
    "self_attn_every_n_layers": "self_attention_every",
    "min_period": "min_period",
    "max_period": "max_period",
}
_ONLY = {  # what else config.json may say, and we can do
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "num_expert_layers": (-1, 0),
    "prefix_length": (-1, 0),
}


class SmolVLAPolicy(ReleasedFlowPolicy):
    """SmolVLA: cameras, instruction and state are the prefix, the noisy actions the suffix."""

    prompt_length = 48
    state_mode = "mean_std"

    @property
    def sizes_class(self) -> type[Any]:
        from vla_async.policies.smolvla_network import SmolVLASizes

        return SmolVLASizes

    def read_release(self, folder: Path) -> dict[str, Any]:
        """Sizes of ``config.json``, and the statistics that LeRobot stores beside the weights."""
        file = folder / "config.json"
        if not file.is_file():
            return {}
        config = json.loads(file.read_text())
        for name, known in _ONLY.items():
            if config.get(name, known[0]) not in known:
                raise ValueError(f"{file}: {name}={config[name]!r} is not supported; it must be one of {list(known)}")
        said = {ours: config[theirs] for theirs, ours in _SIZES.items() if theirs in config}
        if "resize_imgs_with_padding" in config:
            height, width = config["resize_imgs_with_padding"]
            if height != width:
                raise ValueError(f"{file}: resize_imgs_with_padding={[height, width]} must be a square")
            said["image_size"] = height
        modes = config.get("normalization_mapping", {})
        return said | lerobot_statistics(folder, modes)

    def key_map(self, names: Sequence[str]) -> list[tuple[str, str]]:
        return KEY_MAP

    def make_prompt(self, tokenizer: Tokenizer, max_tokens: int) -> PromptTokenizer:
        return PromptTokenizer(tokenizer, max_tokens, INSTRUCTION_LINE, bos=False)

    def make_network(self, tokenizer: Tokenizer) -> SmolVLANetwork:
        from vla_async.policies.smolvla_network import SmolVLANetwork

        return SmolVLANetwork(self.sizes, self.hparams["gradient_checkpointing"])

    def parts(self) -> dict[Freeze, list[nn.Module]]:
        net = self._net
        vlm = [net.vision, net.connector, net.embedding, net.layers, net.norm]
        return {"none": [], "vision": [net.vision], "vlm": vlm}

    def heads(self) -> list[nn.Module]:
        net = self._net
        return [net.state_proj, net.action_in_proj, net.action_time_mlp_in, net.action_time_mlp_out, net.action_out_proj]

    def dims(self) -> tuple[int, int]:
        return int(self.sizes.text_config["hidden_size"]), self.sizes.width

    @property
    def _net(self) -> SmolVLANetwork:
        return cast("SmolVLANetwork", self.network)

    def prefix(self, td: TensorDictBase) -> Prefix:
        """Let the VLM read cameras, instruction and state."""
        size = self.sizes.image_size
        shown, image_mask = self.cameras.read(td)
        images = [resize_with_pad(image, size, size, where="left_top", antialias=False) for image in shown]
        tokens = td[keys.INSTRUCTION_TOKENS]
        features, cache = self._net.prefix(images, image_mask, tokens, self.prompt.mask(tokens), self.read_state(td))
        return Prefix(features, cache.mask, cache)

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity_and_features(prefix, x_t, t)[0]

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity ``[B, H', A']``, and the expert's last hidden states ``[B, H', D]``."""
        cache: SmolVLACache = prefix.cache
        return self._net.velocity(cache, x_t, t)
