"""``LeRobotPolicy``: any policy of LeRobot, through TorchRL's wrapper; those that match flows can be trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.vla import LeRobotPolicyWrapper

from vla_async import keys
from vla_async.envs.base import EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape, Prefix
from vla_async.policies.images import Cameras
from vla_async.policies.measuring import blank_observations
from vla_async.policies.tokenizer import decode_text, encode_text

Batch = dict[str, Any]
_IMAGES, _STATE = "observation.images.", "observation.state"


class LeRobotParts(NamedTuple):
    """What LeRobot makes of a checkpoint.

    Attributes:
        policy: a ``PreTrainedPolicy``.
        preprocess: from a batch in the envs' units (images in [0, 1]) to what the policy reads.
        postprocess: from its actions ``[..., A]`` to the envs' units.
    """

    policy: Any
    preprocess: Callable[[Batch], Batch]
    postprocess: Callable[[Tensor], Tensor]


def load_lerobot(source: str) -> LeRobotParts:
    """Load a policy and its processors from a folder or the hub, by LeRobot.

    Raises:
        ImportError: if LeRobot is not installed.
    """
    try:
        from lerobot.configs.policies import PreTrainedConfig  # type: ignore[import-not-found, unused-ignore]
        from lerobot.policies.factory import (  # type: ignore[import-not-found, unused-ignore]
            get_policy_class,
            make_pre_post_processors,
        )
    except ImportError as error:
        raise ImportError(
            f"model.pretrained={source!r} is loaded by LeRobot, which is not installed here. LeRobot 0.4 needs torch below "
            "2.11: install it in an environment of its own (pip install 'lerobot==0.4.4'), or use this library's own "
            "Pi0Policy, Pi05Policy, SmolVLAPolicy or Gr00tPolicy, which read the same checkpoints"
        ) from error
    config = PreTrainedConfig.from_pretrained(source)
    policy = get_policy_class(config.type).from_pretrained(source, config=config)
    return LeRobotParts(policy, *make_pre_post_processors(config, pretrained_path=source))


class LeRobotPolicy(FlowMatchingPolicy):
    """A policy of LeRobot.

    One that matches flows (π0, π0.5, SmolVLA: its ``model`` has a ``denoise_step``) explores and is trained as any
    :class:`FlowMatchingPolicy`. What it reads of an observation, LeRobot computes without gradient, so only what makes the
    velocity is trained: the action expert. The critic reads the suffix. All others only act: to evaluate.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        pretrained: folder or hub id of the checkpoint.
        loader: where the function is that loads it, as ``module.function``; it returns :class:`LeRobotParts`.
        cameras: name of an image that the policy was trained with to the envs' camera; the same name by default.
        allow_missing_cameras: whether an image may be missing, if the policy can do without.
        max_instruction_bytes: longest instruction, in bytes of UTF-8.
        value: ``suffix``, or null for no critic.
        flow: options of :class:`FlowMatchingPolicy`.
    """

    action_offset: Tensor
    action_scale: Tensor

    def __init__(
        self,
        objective: Objective | None = None,
        pretrained: str = "",
        loader: str = "vla_async.policies.lerobot.load_lerobot",
        cameras: dict[str, str] | None = None,
        allow_missing_cameras: bool = False,
        max_instruction_bytes: int = 256,
        value: Literal["suffix"] | None = "suffix",
        **flow: Any,
    ) -> None:
        if not pretrained:
            raise ValueError("model.pretrained='' names no checkpoint; give a folder or a hub id")
        if value not in ("suffix", None):
            raise ValueError(f"model.value={value!r}: LeRobot hides the prefix's features; choose suffix or null")
        if max_instruction_bytes < 1:
            raise ValueError(f"model.max_instruction_bytes={max_instruction_bytes} must be at least 1")
        super().__init__(objective, value=value, **flow)
        own: dict[str, Any] = {"pretrained": pretrained, "loader": loader, "cameras": cameras}
        own |= {"allow_missing_cameras": allow_missing_cameras, "max_instruction_bytes": max_instruction_bytes}
        self.save_hyperparameters(own)
        self.wrapper: _Wrapper

    # ---------------------------------------------------------------- building

    @property
    def matches_flows(self) -> bool:
        """Whether the policy can be trained; known once it is built."""
        model = getattr(self.wrapper.policy, "model", None)
        return all(hasattr(model, name) for name in ("denoise_step", "action_out_proj"))

    def build(self, spec: EnvSpec) -> None:
        """Load the policy for envs that look like ``spec``; without effect for the same spec again.

        Raises:
            ValueError: if a camera, the state or the actions do not fit, the policy looks at several observations at once,
                or there is an objective for a policy that cannot be trained.
            ImportError: if LeRobot is not installed.
        """
        is_new = self.env_spec is None
        if is_new:
            self._connect(spec)
            if not self.matches_flows:
                kind = type(self.wrapper.policy).__name__
                if self.objective is not None:
                    raise ValueError(f"{kind} matches no flow, so nothing can train it here; set model.objective to null")
                _check_horizon(self.wrapper.policy.config, spec)
                self.env_spec = spec
                return
        super().build(spec)
        if is_new:
            self._freeze_what_only_reads()

    def _freeze_what_only_reads(self) -> None:
        """Leave to training what makes the velocity: the rest gets no gradient, and would be published all the same."""
        td = blank_observations(self, 1, next(self.wrapper.policy.parameters()).device)
        trained = [parameter for parameter in self.wrapper.policy.parameters() if parameter.requires_grad]
        prefix = self.prefix(td)
        with torch.enable_grad():
            x_t = torch.zeros(1, self.flow_shape.horizon, self.flow_shape.model_dim, device=td.device)
            velocity = self.velocity(prefix, x_t, torch.ones(1, device=td.device))
            gradients = torch.autograd.grad(velocity.sum(), trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    def _connect(self, spec: EnvSpec) -> None:
        module, _, function = self.hparams["loader"].rpartition(".")
        parts: LeRobotParts = getattr(importlib.import_module(module), function)(self.hparams["pretrained"])
        config = parts.policy.config
        if getattr(config, "n_obs_steps", 1) > 1:
            raise ValueError(
                f"{type(parts.policy).__name__} looks at {config.n_obs_steps} observations at once, but a decision sees one"
            )
        dim = config.output_features["action"].shape[0]
        if dim != spec.action_dim:
            raise ValueError(f"the policy gives actions of {dim} elements, but the envs take {spec.action_dim}")
        state = config.input_features.get(_STATE)
        if state is not None and state.shape[0] != spec.state_dim:
            raise ValueError(f"the policy reads a state of {state.shape[0]} elements, but the envs give {spec.state_dim}")
        slots = tuple(name.removeprefix(_IMAGES) for name in config.image_features)
        cameras = Cameras(slots, spec.images, self.hparams["cameras"] or {}, self.hparams["allow_missing_cameras"])
        shown = {slot: camera for slot, camera in zip(slots, cameras.sources, strict=True) if camera is not None}
        self.wrapper = _Wrapper(parts, dim, config.chunk_size, shown, state is not None)
        offset, scale = _affine(parts.postprocess, dim)
        self.register_buffer("action_offset", offset)
        self.register_buffer("action_scale", scale)

    def build_model(self, spec: EnvSpec) -> ModelShape:
        """The shape of the policy that :meth:`build` has loaded."""
        config, model = self.wrapper.policy.config, self.wrapper.policy.model
        return ModelShape(config.chunk_size, config.max_action_dim, 1, model.action_out_proj.in_features)

    def tokenize(self, instruction: str) -> Tensor:
        """The instruction as bytes, int64 ``[max_instruction_bytes]``: LeRobot makes its own tokens of it."""
        return encode_text(instruction, self.hparams["max_instruction_bytes"], "max_instruction_bytes")

    def normalize_actions(self, chunk: Tensor) -> Tensor:
        return (chunk - self.action_offset) / self.action_scale

    def unnormalize_actions(self, chunk: Tensor) -> Tensor:
        return chunk.float() * self.action_scale + self.action_offset

    # ---------------------------------------------------------------- deciding

    def _read(self, td: TensorDictBase) -> TensorDict:
        """What TorchRL's wrapper reads."""
        texts = [decode_text(codes) for codes in td[keys.INSTRUCTION_TOKENS].tolist()]
        seen = {"observation": td["observation"], keys.INSTRUCTION: NonTensorStack(*texts)}
        return TensorDict(seen, batch_size=td.batch_size)

    def prefix(self, td: TensorDictBase) -> Prefix:
        """Let the policy read the observation, and keep what it hands to its denoising steps."""
        model, handed = self.wrapper.policy.model, list[Batch]()
        with _intercepted(model, handed):
            self.wrapper(self._read(td))
        if not handed:
            raise RuntimeError(f"{type(model).__name__} made a chunk without denoise_step, so its flow cannot be followed")
        mask = handed[0].get("prefix_pad_masks", torch.ones(len(td), 1, device=td[keys.INSTRUCTION_TOKENS].device)).bool()
        return Prefix(mask.float().unsqueeze(-1), mask, handed[0])

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity_and_features(prefix, x_t, t)[0]

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """One denoising step, and what its last layer was given."""
        model, inputs = self.wrapper.policy.model, list[Tensor]()
        hook = model.action_out_proj.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        try:
            velocity: Tensor = model.denoise_step(**prefix.cache, x_t=x_t, timestep=t)
        finally:
            hook.remove()
        return velocity, inputs[-1]

    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide; see :class:`FlowMatchingPolicy`. A policy that matches no flow gives its chunk and no log-prob."""
        if self.env_spec is None or self.matches_flows:
            return super().act(td)
        with torch.no_grad():
            made = self.wrapper(self._read(td))[keys.CHUNK]
        return td.set(keys.CHUNK, self.unnormalize_actions(made[:, : self.env_spec.chunk_size]))

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        """Log-prob, entropy and value; see :class:`FlowMatchingPolicy`.

        Raises:
            RuntimeError: for a policy that matches no flow.
        """
        if self.env_spec is not None and not self.matches_flows:
            raise RuntimeError(f"{type(self.wrapper.policy).__name__} matches no flow, so its actions have no log-prob")
        return super().evaluate(td)


class _Wrapper(LeRobotPolicyWrapper):
    """TorchRL's wrapper, with all cameras and LeRobot's own preprocessing.

    Args:
        parts: the policy and its processors.
        action_dim: A.
        chunk_size: H', of the policy.
        cameras: the policy's name of each image to the envs' camera.
        use_state: whether the policy reads the state.
    """

    def __init__(
        self, parts: LeRobotParts, action_dim: int, chunk_size: int, cameras: dict[str, str], use_state: bool
    ) -> None:
        super().__init__(parts.policy, action_dim=action_dim, chunk_size=chunk_size, use_state=use_state, inplace=False)
        self.preprocess, self.cameras = parts.preprocess, cameras

    def _to_lerobot_batch(self, td: TensorDictBase) -> Batch:
        batch: Batch = {_IMAGES + slot: td["observation", camera].float() / 255.0 for slot, camera in self.cameras.items()}
        if self.use_state:
            batch[_STATE] = td[keys.STATE]
        return self.preprocess(batch | {"task": td[keys.INSTRUCTION]})


@contextmanager
def _intercepted(model: nn.Module, handed: list[Batch]) -> Iterator[None]:
    """Note what the denoising steps are given besides ``x_t`` and ``timestep``, and do nothing in them."""

    def note(*, x_t: Tensor, timestep: Tensor, **rest: Any) -> Tensor:
        handed.append(rest)
        return torch.zeros_like(x_t)

    object.__setattr__(model, "denoise_step", note)
    try:
        yield
    finally:
        object.__delattr__(model, "denoise_step")


def _affine(postprocess: Callable[[Tensor], Tensor], dim: int) -> tuple[Tensor, Tensor]:
    """Offset and scale ``[A]`` of the way from the policy's actions to the envs'.

    Raises:
        ValueError: if that way is no scale and offset of each element, so that it could not be undone.
    """
    probes = torch.tensor([0.0, 1.0, -1.0, 0.5])
    made = postprocess(probes.unsqueeze(-1).expand(-1, dim).clone()).detach().float()
    offset, scale = made[0], made[1] - made[0]
    expected = offset + probes.to(offset.device).unsqueeze(-1) * scale
    tolerance = 1e-5 * (1.0 + float(made.abs().max()))
    if made.shape != expected.shape or not torch.allclose(made, expected, atol=tolerance) or bool((scale == 0.0).any()):
        raise ValueError(
            "LeRobot's postprocessing of the actions is no scale and offset of each element; this is not supported"
        )
    return offset, scale


def _check_horizon(config: Any, spec: EnvSpec) -> None:
    if spec.chunk_size > config.chunk_size:
        raise ValueError(f"env.chunk_size={spec.chunk_size} is longer than the {config.chunk_size} actions of the policy")
