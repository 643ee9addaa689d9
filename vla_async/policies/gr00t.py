"""``Gr00tPolicy``: GR00T N1.5 (Bjorck et al., arXiv 2503.14734) on transformers' SigLIP and Qwen3, and our own DiT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.objectives.base import Objective
from vla_async.policies.action_bins import Gripper
from vla_async.policies.flow import Prefix
from vla_async.policies.images import center_crop, resize
from vla_async.policies.released import Freeze, ReleasedFlowPolicy, Tokenizer
from vla_async.policies.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from vla_async.policies.gr00t_network import Gr00tCache, Gr00tNetwork

EMBODIMENTS = {"new_embodiment": 31, "oxe_droid": 17, "agibot_genie1": 26, "gr1": 24, "so100": 2, "unitree_g1": 3}
"""The robots that the release names, and the number of the weights of each."""

_EAGLE = "backbone.language_model."
KEY_MAP = [
    (r"^_groot_model\.", ""),  # in LeRobot's layout
    (r"^backbone\.eagle_model\.", "backbone."),
    (r"^backbone\.vision_model\.vision_model\.", "backbone.vision_model."),
    (r"^backbone\.vision_model\.head\..*", ""),  # it pools; nothing reads it
    (r"^backbone\.language_model\.model\.", _EAGLE),
    (r"^backbone\.mlp1\.", "backbone.connector."),
    (r"^action_head\.vlln\.", "context_norm."),
    (r"^action_head\.vl_self_attention\.transformer_blocks\.", "context_blocks."),
    (r"^action_head\.model\.timestep_encoder\.timestep_embedder\.", "dit.time_encoder."),
    (r"^action_head\.model\.transformer_blocks\.", "dit.blocks."),
    (r"^action_head\.model\.", "dit."),
    (r"^action_head\.", ""),
    (r"^((?:dit\.|context_)blocks\.\d+\.)attn1\.to_out\.0\.", r"\1to_out."),
    (r"^((?:dit\.|context_)blocks\.\d+\.)attn1\.", r"\1"),
    (r"^((?:dit\.|context_)blocks\.\d+\.)ff\.net\.0\.proj\.", r"\1feed_forward.0."),
    (r"^((?:dit\.|context_)blocks\.\d+\.)ff\.net\.2\.", r"\1feed_forward.2."),
    (r"^action_encoder\.W(\d)\.", r"action_encoder.layer\1."),
    (r"^((?:action|state)_(?:encoder|decoder)\.layer\d\.)W$", r"\1weight"),
    (r"^((?:action|state)_(?:encoder|decoder)\.layer\d\.)b$", r"\1bias"),
]
"""From the names of ``nvidia/GR00T-N1.5-3B`` to those of :class:`~vla_async.policies.gr00t_network.Gr00tNetwork`."""

_HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"
_ONLY = {  # what else the release's action head may say, and we can do
    "add_pos_embed": (True,),
    "use_vlln": (True,),
}


class Gr00tPolicy(ReleasedFlowPolicy):
    """GR00T N1.5: cameras and instruction are the prefix; a DiT makes the actions of one embodiment, from a state and noise.

    GR00T's own time runs from 0, noise, to 1, and its velocity from noise to action; :meth:`velocity` turns both round.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        embodiment: the robot, by a name of :data:`EMBODIMENTS` or by its number in the weights.
        gripper: what the last action element means to the model, see :data:`~vla_async.policies.action_bins.Gripper`.
        image_area: share of the image's surface, around its middle, that the model sees; released models were often trained
            on crops of 0.95 of each side, an area of 0.9025.
        **released: the options of :class:`~vla_async.policies.released.ReleasedFlowPolicy`.
    """

    prompt_length = 64
    state_mode = "min_max"

    def __init__(
        self,
        objective: Objective | None = None,
        embodiment: str | int = "new_embodiment",
        gripper: Gripper = "as_is",
        image_area: float = 1.0,
        **released: Any,
    ) -> None:
        number = EMBODIMENTS.get(embodiment) if isinstance(embodiment, str) else embodiment
        if number is None or number < 0:
            raise ValueError(
                f"model.embodiment={embodiment!r} is unknown: choose one of {sorted(EMBODIMENTS)}, or its number"
            )
        if gripper not in get_args(Gripper):
            raise ValueError(f"model.gripper={gripper!r} is unknown: choose one of {list(get_args(Gripper))}")
        if not 0.0 < image_area <= 1.0:
            raise ValueError(f"model.image_area={image_area} must lie in (0, 1]")
        if None in (released.get("cameras") or ()):
            raise ValueError("model.cameras: GR00T has no place for a camera that is missing; leave the null out")
        super().__init__(objective, **released)
        self.save_hyperparameters({"embodiment": embodiment, "gripper": gripper, "image_area": image_area})
        self._embodiment = number

    @property
    def sizes_class(self) -> type[Any]:
        from vla_async.policies.gr00t_network import Gr00tSizes

        return Gr00tSizes

    def read_release(self, folder: Path) -> dict[str, Any]:
        """Sizes of ``config.json``. The statistics of the release are split by modality, so they have to be given."""
        file = folder / "config.json"
        if not file.is_file():
            return {}
        config = json.loads(file.read_text())
        head, backbone = config.get("action_head_cfg", {}), config.get("backbone_cfg", {})
        for name, known in _ONLY.items():
            if head.get(name, known[0]) not in known:
                raise ValueError(f"{file}: {name}={head[name]!r} is not supported; it must be one of {list(known)}")
        if backbone.get("project_to_dim") is not None:
            raise ValueError(f"{file}: project_to_dim={backbone['project_to_dim']} is not supported; N1.5 has null")
        dit, context = head.get("diffusion_model_cfg", {}), head.get("vl_self_attention_cfg", {})
        found = {
            "chunk_size": head.get("action_horizon"),
            "max_action_dim": head.get("action_dim"),
            "max_state_dim": head.get("max_state_dim"),
            "max_embodiments": head.get("max_num_embodiments"),
            "hidden_size": head.get("hidden_size"),
            "future_tokens": head.get("num_target_vision_tokens"),
            "time_buckets": head.get("num_timestep_buckets"),
            "dit_heads": dit.get("num_attention_heads"),
            "dit_head_dim": dit.get("attention_head_dim"),
            "dit_layers": dit.get("num_layers"),
            "context_heads": context.get("num_attention_heads"),
            "context_layers": context.get("num_layers"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def key_map(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """:data:`KEY_MAP`; the language model's output layer, which is tied, stands in for an embedding that is missing."""
        has_embedding = any(name.endswith("language_model.model.embed_tokens.weight") for name in names)
        head = (r"^backbone\.language_model\.lm_head\.weight$", "" if has_embedding else f"{_EAGLE}embed_tokens.weight")
        return [*KEY_MAP, head]

    def make_prompt(self, tokenizer: Tokenizer, max_tokens: int) -> PromptTokenizer:
        return PromptTokenizer(tokenizer, max_tokens, "{instruction}" + _TAIL, bos=False)

    def tokenize(self, instruction: str) -> Tensor:
        """What follows the images in the prompt, int64 ``[max_tokens]``."""
        # in training, instructions came as lists of one, and were written out as such
        return self.prompt.tokenize(str([instruction.strip()]))

    def make_network(self, tokenizer: Tokenizer) -> Gr00tNetwork:
        from vla_async.policies.gr00t_network import Gr00tNetwork

        if self._embodiment >= self.sizes.max_embodiments:
            raise ValueError(
                f"model.embodiment={self.hparams['embodiment']!r} is number {self._embodiment}, but there are weights of "
                f"{self.sizes.max_embodiments} embodiments only"
            )
        count = len(self.cameras.slots)
        starts = [f"{'</img>' if index else _HEAD}<image {index + 1}><img>" for index in range(count)]
        frame = [tokenizer(text) for text in (*starts, "</img>")]
        return Gr00tNetwork(self.sizes, frame, self._embodiment, self.hparams["gradient_checkpointing"])

    def parts(self) -> dict[Freeze, list[nn.Module]]:
        backbone = self._net.backbone
        return {"none": [], "vision": [backbone.vision_model], "vlm": [backbone]}

    def heads(self) -> list[nn.Module]:
        net = self._net
        return [net.state_encoder, net.action_encoder, net.action_decoder, net.position_embedding, net.future_tokens]

    def dims(self) -> tuple[int, int]:
        return self.sizes.context_dim, self.sizes.hidden_size

    def normalize_actions(self, chunk: Tensor) -> Tensor:
        if self.hparams["gripper"] == "open_is_one":
            chunk = torch.cat([chunk[..., :-1], (1.0 - chunk[..., -1:]) / 2.0], dim=-1)
        return super().normalize_actions(chunk)

    def unnormalize_actions(self, chunk: Tensor) -> Tensor:
        actions = super().unnormalize_actions(chunk)
        if self.hparams["gripper"] == "as_is":
            return actions
        return torch.cat([actions[..., :-1], 1.0 - 2.0 * actions[..., -1:]], dim=-1)

    @property
    def _net(self) -> Gr00tNetwork:
        return cast("Gr00tNetwork", self.network)

    def prefix(self, td: TensorDictBase) -> Prefix:
        """Let the backbone read cameras and instruction."""
        size, area = self.sizes.image_size, self.hparams["image_area"]
        images = [resize(center_crop(image, area), size, size) for image in self.cameras.read(td)[0]]
        tokens = td[keys.INSTRUCTION_TOKENS]
        features, mask, cache = self._net.prefix(images, tokens, self.prompt.mask(tokens), self.read_state(td))
        return Prefix(features, mask, cache)

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity_and_features(prefix, x_t, t)[0]

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity, noise minus action, ``[B, H', A']``, and the DiT's output at the actions ``[B, H', D]``."""
        cache: Gr00tCache = prefix.cache
        velocity, features = self._net.velocity(cache, x_t, 1.0 - t)
        return -velocity, features
