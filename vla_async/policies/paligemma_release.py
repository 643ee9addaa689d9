"""What the public releases of π0 and π0.5 look like: their sizes, and the names of their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RELEASE_KEYS = [
    (r"^model\.(?!vlm\.|dit\.)", ""),
    (r"^paligemma_with_expert\.paligemma\.(language_model\.)?lm_head\.", "vlm.language_model.embed_tokens."),  # tied
    (r"^paligemma_with_expert\.paligemma\.(model\.)?", "vlm."),
    (r"^vlm\.language_model\.model\.", "vlm.language_model."),
    (r"^vlm\.vision_tower\.vision_model\.", "vlm.vision_tower."),
    # the expert reads no words and says none
    (r"^paligemma_with_expert\.gemma_expert\.(lm_head|model\.embed_tokens)\..*", ""),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "expert."),
    (r"^(un)?normalize_(in|out)puts\..*", ""),  # statistics are settings here
]
"""From the names of ``lerobot/pi0_base``, ``lerobot/pi05_base`` and openpi's to ``vlm.`` and ``expert.``."""


def make_config(release: Path | None, overrides: Mapping[str, Any]) -> Any:
    """A transformers ``PI0Config``: the public sizes, what a release says of its own, then the overrides.

    Raises:
        ValueError: names an override that does not exist, or sizes that cannot work together.
    """
    from transformers import PI0Config

    sizes = PI0Config().to_dict()
    file = None if release is None else release / "config.json"
    if file is not None and file.is_file():
        said = json.loads(file.read_text())
        if said.get("model_type") == "pi0":
            sizes = PI0Config.from_dict(said).to_dict()
        else:  # LeRobot's own format
            names = ("chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period")
            sizes |= {name: said[name] for name in names if name in said}
    sizes = _merge(sizes, overrides, "model.config")
    width = sizes["vlm_config"]["text_config"]["hidden_size"]
    sizes["vlm_config"] |= {"projection_dim": width, "hidden_size": width}
    config: Any = PI0Config.from_dict(sizes)
    text, expert = config.vlm_config.text_config, config.dit_config
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        ours, theirs = getattr(expert, name), getattr(text, name)
        if ours != theirs:
            raise ValueError(
                f"model.config.dit_config.{name}={ours}, but the expert attends to the layers of "
                f"vlm_config.text_config, where it is {theirs}; make them equal"
            )
    return masked(config)


def masked(config: Any) -> Any:
    """The config, set to the attention that masks by bools; the others, a lone block's default too, would add them up."""
    for part in (config, config.vlm_config, config.vlm_config.text_config, config.dit_config):
        part._attn_implementation = "sdpa"
    return config


def _merge(defaults: Mapping[str, Any], overrides: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in overrides.items():
        if name not in defaults:
            raise ValueError(f"{path}.{name} does not exist; there is {', '.join(sorted(defaults))}")
        nested = isinstance(defaults[name], Mapping) and isinstance(value, Mapping)
        merged[name] = _merge(defaults[name], value, f"{path}.{name}") if nested else value
    return merged
