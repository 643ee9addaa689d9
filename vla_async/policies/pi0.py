"""``Pi0Policy``: π0 (arXiv 2410.24164) on transformers' PI0."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.policies.flow import Prefix
from vla_async.policies.paligemma import PrefixCache, run_suffix
from vla_async.policies.paligemma_policy import PaliGemmaPolicy
from vla_async.policies.paligemma_release import RELEASE_KEYS
from vla_async.policies.released import Tokenizer
from vla_async.policies.tokenizer import PromptTokenizer

KEY_MAP = [
    *RELEASE_KEYS,
    (r"^vlm\.", "model.vlm."),
    (r"^expert\.", "model.dit."),
    (r"^model\.dit\.embed_tokens\..*", ""),  # in transformers' own layout
    (r"^(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.", r"embed_action_time.\1."),
]
"""From the names of ``lerobot/pi0_base``, openpi's and transformers' own to those of ``PI0ForConditionalGeneration``."""


class Pi0Policy(PaliGemmaPolicy):
    """π0: the suffix is a token of the state, then the noisy actions, each mixed with the flow's time."""

    prompt_length = 48
    state_mode = "mean_std"
    release_keys = KEY_MAP

    def make_model(self, config: Any) -> nn.Module:
        """A ``PI0ForConditionalGeneration`` without the expert's word embeddings, which nothing reads."""
        from transformers import PI0ForConditionalGeneration

        config.dit_config.vocab_size = 1  # the whole vocabulary would be a quarter of a billion numbers, made to be dropped
        model = PI0ForConditionalGeneration(config)
        model.model.dit.embed_tokens = None
        config.dit_config.vocab_size = config.vlm_config.text_config.vocab_size
        return cast(nn.Module, model)

    @property
    def vlm(self) -> Any:
        return cast(Any, self.network).model.vlm

    @property
    def expert(self) -> nn.Module:
        return cast(nn.Module, cast(Any, self.network).model.dit)

    def heads(self) -> list[nn.Module]:
        model = cast(Any, self.network)
        return [model.embed_action_time, model.action_out_proj]

    def make_prompt(self, tokenizer: Tokenizer, max_tokens: int) -> PromptTokenizer:
        """The instruction and a line break, whose token the releases append on its own."""
        return PromptTokenizer(tokenizer, max_tokens, "{instruction}", suffix=tokenizer("\n"))

    def prefix(self, td: TensorDictBase) -> Prefix:
        """Read cameras and prompt; the state waits for the suffix."""
        return self.read_prefix(td, td[keys.INSTRUCTION_TOKENS], self.read_state(td))

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity ``[B, H', A']``, and the expert's hidden states of the actions ``[B, H', D]``."""
        cache: PrefixCache = prefix.cache
        model: Any = self.network
        embeddings = model.embed_action_time(cache.state, x_t, t).to(prefix.features.dtype)
        blocks = torch.ones(embeddings.shape[1], dtype=torch.int64, device=x_t.device)
        blocks[0] = 0  # the state sees no action
        hidden = run_suffix(self.expert, embeddings, blocks, cache, self.hparams["gradient_checkpointing"])[:, 1:]
        velocity: Tensor = model.action_out_proj(hidden.to(model.action_out_proj.weight.dtype))
        return velocity, hidden
