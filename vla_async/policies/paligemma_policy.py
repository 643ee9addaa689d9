"""``PaliGemmaPolicy``: what ``Pi0Policy`` and ``Pi05Policy`` share, built on :mod:`vla_async.policies.paligemma`."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.checkpoints import find_checkpoint, load_mapped
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape, Prefix
from vla_async.policies.images import Cameras, resize_with_pad
from vla_async.policies.paligemma import PrefixCache, embed_images, run_prefix
from vla_async.policies.paligemma_release import make_config, masked
from vla_async.policies.processing import ActionStatistics, NormalizationMode, Normalizer, StateStatistics
from vla_async.policies.tokenizer import HashingTokenizer, PretrainedTokenizer, PromptTokenizer

Freeze = Literal["none", "vision", "vlm"]
WeightType = Literal["float32", "bfloat16"]

SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The cameras that the releases were trained with, in their order."""


class PaliGemmaPolicy(FlowMatchingPolicy):
    """PaliGemma reads cameras and prompt, an action expert makes the flow. Build :class:`Pi0Policy` or :class:`Pi05Policy`.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        pretrained: a local folder or file, or a hub id, of released weights; None for random ones.
        config: overrides of the release's sizes, by the names of transformers' ``PI0Config``, nested as there.
        cameras: the model's camera slot (:data:`SLOTS`) to the env's camera; by default the envs' cameras fill the slots in
            their order. Slots without a camera are left out, which is the same as masking them.
        tokenizer: a folder, a file or a hub id, for example ``google/paligemma-3b-pt-224``; None hashes words into the
            vocabulary, which only random weights can be used with.
        max_tokens: length of the prompt; the model's own by default.
        state_statistics: fields of :class:`~vla_async.policies.processing.Statistics`; measured on the demonstrations by
            default, and without any the state stays as it is.
        action_statistics: the same for actions; by default the envs' action bounds become -1 and 1.
        freeze: which part is not trained: ``vision`` (the vision tower) or ``vlm`` (all but the action expert).
        gradient_checkpointing: compute activations a second time for the gradient instead of keeping them.
        dtype: of the weights of PaliGemma and the expert; projections and heads stay float32. Updates as small as those of
            RL are lost in bfloat16 weights, so it is meant for what is frozen; otherwise let the trainer's precision mix.
        **flow: the options of :class:`~vla_async.policies.flow.FlowMatchingPolicy`.
    """

    prompt_length: ClassVar[int]
    state_mode: ClassVar[NormalizationMode]
    key_map: ClassVar[list[tuple[str, str]]]  # from the names of releases to those of the model

    def __init__(
        self,
        objective: Objective | None = None,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        cameras: dict[str, str] | None = None,
        tokenizer: str | None = None,
        max_tokens: int | None = None,
        state_statistics: dict[str, Any] | None = None,
        action_statistics: dict[str, Any] | None = None,
        freeze: Freeze = "none",
        gradient_checkpointing: bool = False,
        dtype: WeightType = "float32",
        **flow: Any,
    ) -> None:
        own = {name: value for name, value in locals().items() if name not in ("self", "objective", "flow", "__class__")}
        _check(own)
        super().__init__(objective, **flow)
        self.save_hyperparameters(own)
        self._restoring = False

    # ---------------------------------------------------------------- what a model brings

    @abstractmethod
    def make_model(self, config: Any) -> nn.Module:
        """The model's modules with random weights, from a transformers ``PI0Config``."""

    @property
    @abstractmethod
    def vlm(self) -> Any:
        """The transformers ``PaliGemmaModel`` in the model."""

    @property
    @abstractmethod
    def expert(self) -> nn.Module:
        """The action expert in the model."""

    @abstractmethod
    def make_prompt(self, tokenizer: HashingTokenizer | PretrainedTokenizer, max_tokens: int) -> PromptTokenizer:
        """The model's prompt."""

    # ---------------------------------------------------------------- what both share

    def check_env(self, env: EnvFactory) -> None:
        """Refuse envs that show no state or no camera, before any is built."""
        names = env.observation_names
        if names is not None:
            _check_sight("state" in names, sorted(names - {"state"}))

    def build_model(self, spec: EnvSpec) -> ModelShape:
        """Create the model, its processing and, with ``pretrained``, load the weights; see :class:`FlowMatchingPolicy`.

        Raises:
            ValueError: if the envs give no state or camera, something does not fit the model, or the weights do not.
            FileNotFoundError: if there are no such weights.
        """
        options = self.hparams
        _check_sight(spec.state_dim is not None, sorted(spec.images))
        given = options["cameras"]
        self.cameras = Cameras(SLOTS, spec.images, _in_order(spec.images) if given is None else given, allow_missing=True)
        release = None if options["pretrained"] is None or self._restoring else find_checkpoint(options["pretrained"])
        self.config = make_config(release, options["config"] or {}) if not self._restoring else self._restored_config()
        if spec.state_dim is not None and spec.state_dim > (room := self.config.max_state_dim):
            raise ValueError(f"the envs' state has {spec.state_dim} elements, more than the model's max_state_dim={room}")
        self.model = self.make_model(self.config)
        if release is not None:
            load_mapped(self.model, release, self.key_map)
        self.vlm.to(getattr(torch, options["dtype"]))
        self.expert.to(getattr(torch, options["dtype"]))
        frozen = {"none": None, "vision": self.vlm.vision_tower, "vlm": self.vlm}[options["freeze"]]
        if frozen is not None:
            frozen.requires_grad_(False)
        self._build_processing(spec)
        text, expert = self.config.vlm_config.text_config, self.config.dit_config
        return ModelShape(self.config.chunk_size, self.config.max_action_dim, text.hidden_size, expert.hidden_size)

    def _build_processing(self, spec: EnvSpec) -> None:
        options, vocab_size = self.hparams, self.config.vlm_config.text_config.vocab_size
        source = options["tokenizer"]
        tokenizer = HashingTokenizer(vocab_size) if source is None else PretrainedTokenizer(source)
        self.prompt = self.make_prompt(tokenizer, options["max_tokens"] or self.prompt_length)
        assert spec.state_dim is not None
        given = options["state_statistics"]
        statistics = StateStatistics("identity") if given is None else StateStatistics.from_dict(given)
        self.state_normalizer = Normalizer(statistics, spec.state_dim)
        given = options["action_statistics"]
        self.action_normalizer = None if given is None else Normalizer(ActionStatistics.from_dict(given), spec.action_dim)

    def observe(self, frames: TensorDictBase) -> None:
        """Normalise the state by the statistics of the demonstrations, unless others were given."""
        if self.hparams["state_statistics"] is None:
            measured = StateStatistics.measure(frames[keys.STATE].cpu(), self.state_mode)
            self.state_normalizer.load_state_dict(Normalizer(measured, frames[keys.STATE].shape[-1]).state_dict())

    def normalize_actions(self, chunk: Tensor) -> Tensor:
        if self.action_normalizer is None:
            return super().normalize_actions(chunk)
        return self.action_normalizer.normalize(chunk)

    def unnormalize_actions(self, chunk: Tensor) -> Tensor:
        if self.action_normalizer is None:
            return super().unnormalize_actions(chunk)
        return self.action_normalizer.unnormalize(chunk)

    def read_prefix(self, td: TensorDictBase, tokens: Tensor, state: Tensor | None) -> Prefix:
        """Let PaliGemma read the cameras and a prompt.

        Args:
            td: ``("observation", camera)`` uint8 ``[B, 3, H, W]``.
            tokens: int64 ``[B, L]``.
            state: the state token's ``[B, max_state_dim]``, if the suffix begins with one.
        """
        recompute, size = self.hparams["gradient_checkpointing"], self.config.vlm_config.vision_config.image_size
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

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the sizes beside the env spec, so that a checkpoint needs no release to be loaded."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["model_config"] = self.config.to_json_string(use_diff=False) if self.env_spec is not None else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Create the modules, without the weights of a release: the checkpoint's follow."""
        self._restoring, self._stored_config = True, checkpoint.get("model_config")
        super().on_load_checkpoint(checkpoint)
        self._restoring = False

    def _restored_config(self) -> Any:
        from transformers import PI0Config

        assert self._stored_config is not None
        return masked(PI0Config.from_dict(json.loads(self._stored_config)))


def _in_order(images: Mapping[str, tuple[int, int, int]]) -> dict[str, str | None]:
    if len(images) > len(SLOTS):
        raise ValueError(f"the envs have {len(images)} cameras; choose {len(SLOTS)} by model.cameras: {{slot: camera}}")
    return dict(zip(SLOTS, images, strict=False))


def _check_sight(has_state: bool, cameras: list[str]) -> None:
    if not (has_state and cameras):
        raise ValueError(
            f"the model reads a state and at least one camera, but the envs give {'a' if has_state else 'no'} state and "
            f"cameras {cameras}; choose an env.obs with both"
        )


def _check(options: Mapping[str, Any]) -> None:
    """Refuse values that cannot work: the error names the field, the value and the fix."""
    if options["pretrained"] is not None and options["tokenizer"] is None:
        raise ValueError(
            f"model.pretrained={options['pretrained']!r} needs the tokenizer it was trained with; set model.tokenizer, for "
            "example to google/paligemma-3b-pt-224 or a folder with it"
        )
    for name, choices in (("freeze", get_args(Freeze)), ("dtype", get_args(WeightType))):
        if options[name] not in choices:
            raise ValueError(f"model.{name}={options[name]!r} is unknown: choose one of {list(choices)}")
    if options["max_tokens"] is not None and options["max_tokens"] < 1:
        raise ValueError(f"model.max_tokens={options['max_tokens']} must be at least 1")
    unknown = sorted(set(options["cameras"] or {}) - set(SLOTS))
    if unknown:
        raise ValueError(f"model.cameras: the model has no slots {unknown}; it has {list(SLOTS)}")
