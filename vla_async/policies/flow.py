"""``FlowMatchingPolicy``: all that flow-matching VLAs share. A model brings its prefix and its velocity."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_async import keys
from vla_async.envs.base import EnvSpec
from vla_async.monitor.metric_table import SFT_FLOW_MATCHING
from vla_async.objectives.base import Objective, StepOutput
from vla_async.policies.base import VLAPolicy
from vla_async.policies.flow_exploration import Exploration, Field, FlowNoise, FlowODE, FlowSDE, FlowShape
from vla_async.policies.flow_options import ModelShape, check_fit, check_options
from vla_async.policies.flow_sampling import Draws, interpolate
from vla_async.policies.flow_value import ValueHead, masked_mean
from vla_async.policies.optimizers import actor_critic_adamw

__all__ = ["FlowMatchingPolicy", "ModelShape", "Prefix"]

FlowNoiseKind = Literal["flow_sde", "flow_noise", "ode"]
FlowValue = Literal["prefix", "suffix"]


@dataclass(frozen=True)
class Prefix:
    """What a model makes of an observation, once per decision.

    Attributes:
        features: hidden states ``[B, N, D]`` of images, instruction and state; the value head reads their mean.
        mask: bool ``[B, N]``, false where a token is padding.
        cache: whatever :meth:`FlowMatchingPolicy.velocity` needs, for example keys and values. It is used K times, so
            ``velocity`` must leave it as it is.
    """

    features: Tensor
    mask: Tensor
    cache: Any = None


class FlowMatchingPolicy(VLAPolicy):
    """A policy whose chunk is the end of a flow from noise, trained by PPO or GRPO through a stochastic flow.

    A subclass implements :meth:`build_model`, :meth:`prefix`, :meth:`velocity` and :meth:`tokenize`. It may override
    :meth:`velocity_and_features`, :meth:`normalize_actions` with :meth:`unnormalize_actions`, and :meth:`sample_time`. Its
    ``__init__`` takes options of its own and passes the others on; both are stored as hyperparameters.

    Time and velocity are as in :mod:`vla_async.policies.flow_sampling`: ``t`` from 1, noise, to 0, the action. A decision's
    noise is that of its request key alone, and what its log-prob is recomputed from is stored with it, so neither depends
    on the batch. Log-probs are those of the model's own, normalised actions; the scale cancels in every ratio.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        num_steps: K, the denoising steps.
        noise: how it explores: ``flow_sde`` makes one random denoising step stochastic, ``flow_noise`` gives all of them a
            learned deviation, ``ode`` neither, so that there is nothing to reinforce.
        noise_level: a, the scale of Flow-SDE's noise.
        noise_std: limits of Flow-Noise's deviation, as a share of half the action range.
        noise_hidden: widths of the layers that read this deviation from the suffix features.
        value: what the critic reads: the mean of the ``prefix``, or of the ``suffix`` features of the executed actions, at
            the denoising step that was stochastic (Flow-SDE) or over all steps; null for no critic.
        value_hidden: widths of the critic's hidden layers.
        detach_value: whether the critic reads without moving what it reads, so that an untrained one cannot spoil the model.
        lr: learning rate.
        critic_lr: learning rate of the critic; ``lr`` by default.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay, on weight matrices only.
    """

    action_middle: Tensor
    action_half_range: Tensor

    def __init__(
        self,
        objective: Objective | None = None,
        num_steps: int = 4,
        noise: FlowNoiseKind = "flow_sde",
        noise_level: float = 0.5,
        noise_std: tuple[float, float] = (0.08, 0.16),
        noise_hidden: Sequence[int] = (128, 64),
        value: FlowValue | None = "prefix",
        value_hidden: Sequence[int] = (256, 256),
        detach_value: bool = True,
        lr: float = 2e-5,
        critic_lr: float | None = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "objective", "__class__")}
        check_options(arguments, objective)
        super().__init__(objective)
        # named explicitly: under LightningCLI the default would store the parser's view of them, objective included
        lists = {name: list(arguments[name]) for name in ("noise_std", "noise_hidden", "value_hidden", "betas")}
        self.save_hyperparameters(arguments | lists)
        self.exploration: Exploration
        self.value_head: ValueHead | None = None

    # ---------------------------------------------------------------- what a model brings

    @abstractmethod
    def build_model(self, spec: EnvSpec) -> ModelShape:
        """Create the model's modules for envs that look like ``spec``.

        Raises:
            ValueError: if the model cannot serve such envs.
        """

    @abstractmethod
    def prefix(self, td: TensorDictBase) -> Prefix:
        """Read the observations and the instruction of ``td`` ``[B]``, once per decision."""

    @abstractmethod
    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        """The velocity, noise minus action, that the model expects.

        Args:
            prefix: of the same rows.
            x_t: float32 ``[B, H', A']``.
            t: float32 ``[B]`` in [0, 1], each row its own; 1 is noise.

        Returns:
            ``[B, H', A']``.
        """

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """The velocity, and the suffix features ``[B, H', D]`` that it is read from, or None.

        What a model overrides to have its critic (``value="suffix"``) or its noise (``flow_noise``) read these features.
        """
        return self.velocity(prefix, x_t, t), None

    def normalize_actions(self, chunk: Tensor) -> Tensor:
        """From the env's units to the model's, ``[..., A]``; by default the action bounds become -1 and 1."""
        return (chunk - self.action_middle) / self.action_half_range

    def unnormalize_actions(self, chunk: Tensor) -> Tensor:
        """The inverse of :meth:`normalize_actions`."""
        return chunk * self.action_half_range + self.action_middle

    def sample_time(self, rows: int) -> Tensor:
        """Times to imitate at, float32 ``[rows]``: of Beta(1.5, 1), which favours noise (π0, arXiv 2410.24164)."""
        return 0.001 + 0.999 * torch.rand(rows, device=self.device) ** (2.0 / 3.0)

    # ---------------------------------------------------------------- what all of them share

    def build(self, spec: EnvSpec) -> None:
        """Create the modules for envs that look like ``spec``; without effect for the same spec again.

        Raises:
            ValueError: if the model cannot serve such envs, is too short or narrow for their chunks, has no suffix features
                and ``value="suffix"``, or the policy was built for other envs.
        """
        if self.env_spec is not None:
            if self.env_spec != spec:
                raise ValueError(f"the policy was built for {self.env_spec}, so it cannot serve {spec}; make a new one")
            return
        options, shape = self.hparams, self.build_model(spec)
        check_fit(shape, spec, options["value"])
        self.flow_shape = FlowShape(shape.horizon, shape.action_dim, spec.chunk_size, spec.action_dim, options["num_steps"])
        if options["noise"] == "flow_sde":
            self.exploration = FlowSDE(self.flow_shape, options["noise_level"])
        elif options["noise"] == "flow_noise":
            limits = options["noise_std"][0], options["noise_std"][1]
            self.exploration = FlowNoise(self.flow_shape, limits, shape.suffix_dim, options["noise_hidden"])
        else:
            self.exploration = FlowODE(self.flow_shape)
        dim = shape.suffix_dim if options["value"] == "suffix" else shape.prefix_dim
        if options["value"] is not None:
            assert dim is not None
            self.value_head = ValueHead(dim, options["value_hidden"], options["detach_value"])
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        bounded = torch.isfinite(low) & torch.isfinite(high)
        # not in the state dict: the envs say it, not the training
        self.register_buffer("action_middle", torch.where(bounded, (low + high) / 2, 0.0), persistent=False)
        self.register_buffer("action_half_range", torch.where(bounded, (high - low) / 2, 1.0), persistent=False)
        self.env_spec = spec

    def _field(self, prefix: Prefix) -> Field:
        def field(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            velocity, features = self.velocity_and_features(prefix, x_t, t)
            return velocity.float(), features

        return field

    def _prefix(self, td: TensorDictBase) -> Prefix:
        if self.env_spec is None:
            raise RuntimeError("the policy has no modules yet; call build(env.env_spec) first")
        return self.prefix(td)

    def _value(self, prefix: Prefix, suffix: Tensor | None) -> dict[Any, Tensor]:
        """The value ``[B, 1]`` by its key; nothing without a critic."""
        if self.value_head is None:
            return {}
        if self.hparams["value"] == "suffix":
            assert suffix is not None
            return {keys.VALUE: self.value_head(suffix)}
        return {keys.VALUE: self.value_head(masked_mean(prefix.features, prefix.mask))}

    @torch.no_grad()
    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide; see :meth:`VLAPolicy.act`. Without a request key the noise is torch's global generator's.

        Beside the chunk, its log-prob and the value, it writes what :meth:`evaluate` needs (``keys.FLOW_...``). Under
        ``ExplorationType.DETERMINISTIC`` the chunk is the ODE's, from the noise of its request key.
        """
        rows = td.reshape(-1)
        prefix, request_keys = self._prefix(rows), rows.get(keys.REQUEST_KEY, None)
        draws = Draws(len(rows), prefix.features.device, None if request_keys is None else request_keys.squeeze(-1))
        explore = exploration_type() in (None, ExplorationType.RANDOM)
        sampled = self.exploration.sample(self._field(prefix), draws, explore)
        made = sampled.stored | self._value(prefix, sampled.features)
        made[keys.CHUNK] = self.unnormalize_actions(sampled.chunk)
        if sampled.log_prob is not None:
            made[keys.LOG_PROB] = sampled.log_prob
        for key, value in made.items():
            td.set(key, value.reshape(*td.batch_size, *value.shape[1:]))
        return td

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        """Log-prob, entropy and value of stored decisions, with gradient; see :meth:`VLAPolicy.evaluate`.

        Raises:
            RuntimeError: with ``noise="ode"``, which has no log-prob.
        """
        rows = td.reshape(-1)
        prefix = self._prefix(rows)
        again = self.exploration.recompute(self._field(prefix), rows)
        made = {keys.LOG_PROB: again.log_prob, keys.ENTROPY: again.entropy} | self._value(prefix, again.features)
        return TensorDict(made, batch_size=rows.batch_size).reshape(td.batch_size)

    def imitation_step(self, batch: TensorDictBase) -> StepOutput:
        """The flow-matching loss: the squared error of the velocity at random times and noise, padding left out.

        The model learns the H actions that are shown, in all its A' dimensions, for those the env does not have are zero.
        What it makes after them is not asked of it; it sees the last action repeated there.
        """
        prefix, shape = self._prefix(batch), self.flow_shape
        shown = self.normalize_actions(batch[keys.CHUNK])
        shown = nn.functional.pad(shown, (0, shape.model_dim - shape.action_dim))
        rest = shown[:, -1:].expand(-1, shape.horizon - shape.chunk_size, -1)
        action = torch.cat([shown, rest], dim=1)
        noise, t = torch.randn_like(action), self.sample_time(len(action))
        velocity, _ = self._field(prefix)(interpolate(action, noise, t), t)
        error = (velocity - (noise - action)).square()[:, : shape.chunk_size]
        valid = ~batch[keys.ACTION_IS_PAD].unsqueeze(-1)
        count = int(valid.sum()) * shape.model_dim
        loss = torch.where(valid, error, 0.0).sum()
        return StepOutput(loss, count, {SFT_FLOW_MATCHING: (loss.detach(), float(count))})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of what is not frozen, with the model and the critic in groups of their own."""
        return actor_critic_adamw(self, "value_head.", self.hparams)
