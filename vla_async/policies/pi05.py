"""``Pi05Policy``: π0.5 (arXiv 2504.16054)."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.envs.base import EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.flow import ModelShape, Prefix
from vla_async.policies.paligemma import Pi05Model, run_suffix
from vla_async.policies.paligemma_policy import PaliGemmaPolicy
from vla_async.policies.paligemma_release import RELEASE_KEYS
from vla_async.policies.processing import discretize, pad_last
from vla_async.policies.released import Tokenizer
from vla_async.policies.tokenizer import STATE_PROMPT, PromptTokenizer, encode_text

KEY_MAP = [*RELEASE_KEYS, (r"^action_time_mlp_(in|out)\.", r"time_mlp_\1.")]
"""From the names of ``lerobot/pi05_base`` and openpi's to those of :class:`~vla_async.policies.paligemma.Pi05Model`."""

_BINS = 256


class Pi05Policy(PaliGemmaPolicy):
    """π0.5: the prompt holds the state as numbers of bins, the suffix is the noisy actions, and time conditions the norms.

    The prompt depends on the state, so it is made per decision; what an instruction becomes once per episode is its text.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        prompt_state_dim: to how many elements the state is padded with zeros in the prompt: None for its own (openpi), 32
            for models fine-tuned with LeRobot.
        max_bytes: longest instruction, in bytes of UTF-8.
        **options: those of :class:`~vla_async.policies.released.ReleasedFlowPolicy`. State and action statistics are
            quantiles in the releases.
    """

    prompt_length = 200
    state_mode = "quantiles"
    release_keys = KEY_MAP

    def __init__(
        self,
        objective: Objective | None = None,
        prompt_state_dim: int | None = None,
        max_bytes: int = 256,
        **options: Any,
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"model.max_bytes={max_bytes} must be at least 1")
        super().__init__(objective, **options)
        self.save_hyperparameters({"prompt_state_dim": prompt_state_dim, "max_bytes": max_bytes})

    def build_model(self, spec: EnvSpec) -> ModelShape:
        shape, dim = super().build_model(spec), self.hparams["prompt_state_dim"]
        assert spec.state_dim is not None
        if dim is not None and dim < spec.state_dim:
            raise ValueError(f"model.prompt_state_dim={dim} is below the envs' {spec.state_dim} state elements; raise it")
        self.prompt_state_dim = spec.state_dim if dim is None else dim
        return shape

    def make_model(self, config: Any) -> nn.Module:
        return Pi05Model(config)

    @property
    def vlm(self) -> Any:
        return self.network.vlm

    @property
    def expert(self) -> nn.Module:
        return cast(nn.Module, self.network.expert)

    def heads(self) -> list[nn.Module]:
        model = cast(Any, self.network)
        return [model.action_in_proj, model.action_out_proj, model.time_mlp_in, model.time_mlp_out]

    def make_prompt(self, tokenizer: Tokenizer, max_tokens: int) -> PromptTokenizer:
        return PromptTokenizer(tokenizer, max_tokens, STATE_PROMPT)

    def tokenize(self, instruction: str) -> Tensor:
        """The instruction's text, int64 ``[max_bytes]``.

        Raises:
            ValueError: if the prompt could become too long for ``max_tokens``.
        """
        self.prompt.tokenize(instruction, [_BINS - 1] * self.prompt_state_dim)
        return encode_text(instruction, self.hparams["max_bytes"])

    def prefix(self, td: TensorDictBase) -> Prefix:
        """Read cameras and a prompt with the state in it."""
        state = pad_last(self.state_normalizer.normalize(td[keys.STATE]), self.prompt_state_dim, "the state")
        tokens = self.prompt.with_state(td[keys.INSTRUCTION_TOKENS], discretize(state, _BINS))
        return self.read_prefix(td, tokens, None)

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity ``[B, H', A']``, and the expert's hidden states of the actions ``[B, H', D]``."""
        model: Any = self.network
        embeddings = model.action_in_proj(x_t).to(prefix.features.dtype)
        blocks = torch.zeros(embeddings.shape[1], dtype=torch.int64, device=x_t.device)
        recompute, condition = self.hparams["gradient_checkpointing"], model.condition(t)
        hidden = run_suffix(self.expert, embeddings, blocks, prefix.cache, recompute, condition=condition)
        velocity: Tensor = model.action_out_proj(hidden.to(model.action_out_proj.weight.dtype))
        return velocity, hidden
