"""``VLAPolicy``: all that a new policy has to provide."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule
from tensordict import TensorDictBase
from torch import Tensor

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.monitor.metric_table import SFT_NLL
from vla_async.objectives.base import Objective, StepOutput

__all__ = ["StepOutput", "VLAPolicy"]


class VLAPolicy(LightningModule):
    """A Vision-Language-Action policy that reinforcement learning can train.

    A subclass implements :meth:`build`, :meth:`act`, :meth:`evaluate`, :meth:`tokenize` and Lightning's
    ``configure_optimizers``; ``training_step`` and ``imitation_step`` have defaults and can be overridden as usual.

    Args:
        objective: turns a batch of trajectories into a loss; None for a policy that is only evaluated or imitates.
    """

    def __init__(self, objective: Objective | None = None) -> None:
        super().__init__()
        self.objective = objective
        self.env_spec: EnvSpec | None = None

    def check_env(self, env: EnvFactory) -> None:
        """Refuse envs that the policy cannot serve, by what is known of them before any is built.

        Raises:
            ValueError: names the setting and the fix.
        """

    @abstractmethod
    def build(self, spec: EnvSpec) -> None:
        """Create the modules, once, for envs that look like ``spec``.

        Called before the policy is used, again without effect if the spec is the same.

        Raises:
            ValueError: if the policy cannot serve such envs (for example, it wants an image and there is none).
        """

    @abstractmethod
    def tokenize(self, instruction: str) -> Tensor:
        """Turn an instruction into int64 ``[L]``, the same L for every instruction."""

    def observe(self, frames: TensorDictBase) -> None:
        """Look at all demonstrated frames once, before imitation starts: for normalisation statistics and the like.

        Args:
            frames: TensorDict ``[frames]`` with ``"observation"`` and ``"action"`` ``[frames, A]``.
        """

    @abstractmethod
    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide, without gradient.

        Reads ``"observation"``, ``"instruction_tokens"`` and, if present, ``"request_key"`` (int64 ``[B, 1]``), which
        alone must determine the noise of its row. Under TorchRL's ``ExplorationType.DETERMINISTIC`` it takes the mode.

        Returns:
            ``td`` with ``("vla_action", "chunk")`` ``[B, H, A]``, ``"action_log_prob"`` ``[B, H, A]`` and, if the policy
            has a critic, ``"state_value"`` ``[B, 1]``.
        """

    @abstractmethod
    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        """Recompute, with gradient, what the policy thinks of the stored decisions.

        Returns:
            A new TensorDict with ``"action_log_prob"`` ``[B, H, A]``, ``"entropy"`` ``[B, H, A]`` and, if the policy has
            a critic, ``"state_value"`` ``[B, 1]``.
        """

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """The same as :meth:`act`, so that the policy is a TensorDict module for TorchRL's collectors."""
        with torch.no_grad():
            return self.act(self.with_tokens(td))

    def with_tokens(self, td: TensorDictBase) -> TensorDictBase:
        """Write ``"instruction_tokens"`` into a TensorDict that carries the instruction as text."""
        if keys.INSTRUCTION not in td.keys():
            return td
        # always anew: a TorchRL collector carries our own key over into episodes that have another instruction
        texts = td.get(keys.INSTRUCTION).tolist() if td.batch_size else td[keys.INSTRUCTION]
        tokens = torch.stack([self.tokenize(text) for text in _flatten(texts)]).to(self.device)
        return td.set(keys.INSTRUCTION_TOKENS, tokens.reshape(*td.batch_size, -1))

    def training_step(self, batch: TensorDictBase, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        """The loss of one micro-batch of decisions, by the objective.

        Raises:
            ValueError: if the policy has no objective.
        """
        if self.objective is None:
            raise ValueError(f"{type(self).__name__} has no objective; set model.objective, for example to PPO")
        return self.objective(self, batch)

    def imitation_step(self, batch: TensorDictBase) -> StepOutput:
        """Behaviour cloning: minus the log-likelihood of the demonstrated actions, padding left out.

        Args:
            batch: ``"observation"``, ``"instruction_tokens"``, ``("vla_action", "chunk")`` ``[B, H, A]`` and
                ``"action_is_pad"`` ``[B, H]``.
        """
        valid = ~batch[keys.ACTION_IS_PAD]
        log_prob = self.evaluate(batch)[keys.LOG_PROB] * valid.unsqueeze(-1)
        count = int(valid.sum()) * log_prob.shape[-1]
        loss = -log_prob.sum()
        return StepOutput(loss, count, {SFT_NLL: (loss.detach(), count)})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the env spec: the modules are built from it."""
        checkpoint["env_spec"] = None if self.env_spec is None else self.env_spec.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Create the modules before ``load_from_checkpoint`` fills them."""
        if checkpoint.get("env_spec") is not None:
            self.build(EnvSpec.from_dict(checkpoint["env_spec"]))


def _flatten(texts: Any) -> list[str]:
    """The strings of an arbitrarily nested list, in order."""
    return [texts] if isinstance(texts, str) else [text for part in texts for text in _flatten(part)]
