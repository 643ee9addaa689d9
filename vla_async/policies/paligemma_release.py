"""What the public releases of π0 and π0.5 look like: their sizes, and the names of their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_async.policies.size_fields import check_fields

RELEASE_KEYS = [
    (r"^model\.(?!vlm\.|dit\.)", ""),
    (r"^paligemma_with_expert\.paligemma\.(language_model\.)?lm_head\.", "vlm.language_model.embed_tokens."),  # tied
    (r"^paligemma_with_expert\.paligemma\.(model\.)?", "vlm."),
    (r"^vlm\.language_model\.model\.", "vlm.language_model."),
    (r"^vlm\.vision_tower\.vision_model\.", "vlm.vision_tower."),
    # the expert reads no words and says none
    (r"^paligemma_with_expert\.gemma_expert\.(lm_head|model\.embed_tokens)\..*", ""),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "expert."),
    (r"^(un)?normalize_(inputs|targets|outputs)\..*", ""),  # statistics are settings here
]
"""From the names of ``lerobot/pi0_base``, ``lerobot/pi05_base`` and openpi's to ``vlm.`` and ``expert.``."""

# google/paligemma-3b-pt-224 and the expert of 300 million parameters, by the names of transformers' configs
_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 224,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_TEXT = {
    "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257152,
}  # fmt: skip
_EXPERT = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
_OTHERS = ("chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period")


@dataclass(frozen=True, kw_only=True)
class PaliGemmaSizes:
    """Sizes of the network; the defaults are those of the releases.

    Args:
        vision: fields of transformers' ``SiglipVisionConfig``, over the release's.
        text: fields of ``GemmaConfig``, over the release's.
        expert: fields of ``GemmaConfig``, over the release's.
        chunk_size: H'.
        max_state_dim: the state is padded to this.
        max_action_dim: A'.
        min_period: shortest wave of the time embedding.
        max_period: longest wave of the time embedding.

    Raises:
        ValueError: names the field and the fix.
    """

    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    expert: Mapping[str, Any] = field(default_factory=dict)
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0

    def __post_init__(self) -> None:
        from transformers import GemmaConfig, SiglipVisionConfig

        for name in ("chunk_size", "max_state_dim", "max_action_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.config: {name}={getattr(self, name)} must be at least 1")
        if not 0.0 < self.min_period < self.max_period:
            raise ValueError(
                f"model.config: min_period={self.min_period} must lie between 0 and max_period={self.max_period}"
            )
        for name, kind in (("vision", SiglipVisionConfig), ("text", GemmaConfig), ("expert", GemmaConfig)):
            check_fields(name, getattr(self, name), kind)
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            ours, theirs = self.expert_config[name], self.text_config[name]
            if ours != theirs:
                raise ValueError(
                    f"model.config: expert.{name}={ours}, but the expert attends to the layers of text, where it is "
                    f"{theirs}; make them equal"
                )

    @property
    def vision_config(self) -> dict[str, Any]:
        return {**_VISION, **self.vision}

    @property
    def text_config(self) -> dict[str, Any]:
        return {**_TEXT, **self.text}

    @property
    def expert_config(self) -> dict[str, Any]:
        return {**_EXPERT, **self.expert}

    def make_config(self) -> Any:
        """A transformers ``PI0Config``."""
        from transformers import PI0Config

        width = self.text_config["hidden_size"]
        sub = {"vision_config": self.vision_config, "text_config": self.text_config}
        vlm = {**sub, "projection_dim": width, "hidden_size": width, "image_token_index": self.text_config["vocab_size"]}
        sizes = {name: getattr(self, name) for name in _OTHERS}
        config: Any = PI0Config(vlm_config=vlm, dit_config=self.expert_config, **sizes)
        # the attention that masks by bools; the others, a lone block's default too, would add them up
        for part in (config, config.vlm_config, config.vlm_config.text_config, config.dit_config):
            part._attn_implementation = "sdpa"
        return config


def read_sizes(folder: Path) -> dict[str, Any]:
    """The sizes that a release's ``config.json`` says: all in transformers' format, some in LeRobot's, none if missing."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text())
    sizes = {name: config[name] for name in _OTHERS if name in config}
    if config.get("model_type") == "pi0":
        vlm = config["vlm_config"]
        parts = {"vision": vlm["vision_config"], "text": vlm["text_config"], "expert": config["dit_config"]}
        known = {"vision": _VISION, "text": _TEXT, "expert": _EXPERT}
        sizes |= {part: {name: said[name] for name in known[part] if name in said} for part, said in parts.items()}
    return sizes
