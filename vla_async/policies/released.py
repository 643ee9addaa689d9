"""``ReleasedFlowPolicy``: what :class:`SmolVLAPolicy` and :class:`Gr00tPolicy` share beside their networks."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.objectives.base import Objective
from vla_async.policies.adapters import LoRA, choose_trained
from vla_async.policies.checkpoints import TensorFiles, cast_weights, find_checkpoint, load_mapped
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape
from vla_async.policies.images import Cameras
from vla_async.policies.processing import ActionStatistics, NormalizationMode, Normalizer, StateStatistics, pad_last
from vla_async.policies.tokenizer import HashingTokenizer, PretrainedTokenizer, PromptTokenizer

Freeze = Literal["none", "vision", "vlm"]
WeightType = Literal["float32", "bfloat16"]
Tokenizer = HashingTokenizer | PretrainedTokenizer
_MODES = {"MEAN_STD": "mean_std", "MIN_MAX": "min_max", "QUANTILES": "quantiles", "IDENTITY": "identity"}
_STATISTICS = {"state_statistics": StateStatistics, "action_statistics": ActionStatistics}


class ReleasedFlowPolicy(FlowMatchingPolicy):
    """A flow-matching policy around a network that is also released as weights.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        pretrained: a local folder or file, or a hub id, of released weights; None for random ones.
        config: overrides of the release's sizes, see the network's.
        cameras: the envs' cameras in the order in which the model sees them, null where it shall see none (black, and masked
            out); all of the envs' by default, in their order.
        tokenizer: a folder, a file or a hub id; None hashes words into the vocabulary, which only random weights can be used
            with.
        max_tokens: length of the prompt; the model's own by default.
        state_statistics: fields of :class:`~vla_async.policies.processing.Statistics`; the release's by default. Without
            any, the state stays as it is until demonstrations are imitated, on which they are then measured.
        action_statistics: the same for actions; for random weights the envs' action bounds become -1 and 1 by default.
        freeze: which part is not trained: ``vision`` (the vision tower) or ``vlm`` (all but what makes the actions).
        lora: fields of :class:`~vla_async.policies.adapters.LoRA`: of what ``freeze`` leaves, train low-rank additions to
            the linear layers, what :meth:`heads` names and the critic only. None trains the weights themselves.
        gradient_checkpointing: compute activations a second time for the gradient instead of keeping them.
        dtype: of the network's weights. Updates as small as those of RL are lost in bfloat16 weights, so it is meant for
            evaluation; otherwise let the trainer's precision mix.
        **flow: the options of :class:`~vla_async.policies.flow.FlowMatchingPolicy`.
    """

    prompt_length: ClassVar[int]
    state_mode: ClassVar[NormalizationMode]
    spare_tokens: ClassVar[int] = 0  # so many of the tokenizer's last tokens have no embedding, for they are in no prompt
    network: nn.Module
    sizes: Any

    def __init__(
        self,
        objective: Objective | None = None,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        cameras: list[str | None] | None = None,
        tokenizer: str | None = None,
        max_tokens: int | None = None,
        state_statistics: dict[str, Any] | None = None,
        action_statistics: dict[str, Any] | None = None,
        freeze: Freeze = "none",
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        dtype: WeightType = "float32",
        **flow: Any,
    ) -> None:
        own = {name: value for name, value in locals().items() if name not in ("self", "objective", "flow", "__class__")}
        _check(own)
        LoRA.read(lora, objective)
        super().__init__(objective, **flow)
        self.save_hyperparameters(own)
        self._restoring = False

    # ---------------------------------------------------------------- what a model brings

    @property
    @abstractmethod
    def sizes_class(self) -> type[Any]:
        """The dataclass of the network's sizes."""

    @abstractmethod
    def read_release(self, folder: Path) -> dict[str, Any]:
        """Sizes that a release says of itself, and ``state_statistics`` and ``action_statistics`` if it has them."""

    @abstractmethod
    def key_map(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """From the names in a release to those in the network, for :func:`~vla_async.policies.checkpoints.load_mapped`."""

    @abstractmethod
    def make_prompt(self, tokenizer: Tokenizer, max_tokens: int) -> PromptTokenizer:
        """The model's prompt, as far as it changes from one instruction to another."""

    @abstractmethod
    def make_network(self, tokenizer: Tokenizer) -> nn.Module:
        """The network with random weights, of ``self.sizes``."""

    @abstractmethod
    def parts(self) -> dict[Freeze, list[nn.Module]]:
        """The modules of the network that each choice of ``freeze`` leaves untrained."""

    @abstractmethod
    def heads(self) -> list[nn.Module]:
        """The modules of the network that are trained whole beside low-rank additions: around the actions."""

    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """Features of the network's prefix and suffix."""

    def cast_network(self, dtype: torch.dtype) -> None:
        """Give the network's weights a type; all of them, unless a model keeps some in float32."""
        cast_weights(self.network, dtype)

    # ---------------------------------------------------------------- what they share

    def check_env(self, env: EnvFactory) -> None:
        """Refuse envs that show no state or no camera, before any is built."""
        names = env.observation_names
        if names is not None:
            _check_sight("state" in names, sorted(names - {"state"}))

    def build_model(self, spec: EnvSpec) -> ModelShape:
        """Create the network and its processing and, with ``pretrained``, load the weights; see :class:`FlowMatchingPolicy`.

        Raises:
            ValueError: if the envs give no state or camera, something does not fit the network, or the weights do not.
            FileNotFoundError: if there are no such weights.
        """
        options = self.hparams
        _check_sight(spec.state_dim is not None, sorted(spec.images))
        release = None if options["pretrained"] is None or self._restoring else find_checkpoint(options["pretrained"])
        said = {} if release is None else self.read_release(release if release.is_dir() else release.parent)
        # what a release says becomes a setting, so that a checkpoint of ours needs no release to be loaded
        for name in _STATISTICS:
            given = said.pop(name, None)
            options[name] = given if options[name] is None else options[name]
        self.sizes = make_sizes(self.sizes_class, {**said, **(options["config"] or {})})
        options["config"] = dataclasses.asdict(self.sizes)
        assert spec.state_dim is not None
        if spec.state_dim > self.sizes.max_state_dim:
            raise ValueError(
                f"the envs' state has {spec.state_dim} elements, but the model has room for {self.sizes.max_state_dim}"
            )
        self._build_processing(spec)
        self.network = self.make_network(self.prompt.tokenizer)
        if release is not None:
            files = TensorFiles(release)
            load_mapped(self.network, files, self.key_map(list(files)))
        self.cast_network(getattr(torch, options["dtype"]))
        frozen = self.parts()[options["freeze"]]
        choose_trained(self.network, options["lora"], frozen=frozen, whole=self.heads())
        return ModelShape(self.sizes.chunk_size, self.sizes.max_action_dim, *self.dims())

    def _build_processing(self, spec: EnvSpec) -> None:
        options, vocab_size = self.hparams, self.sizes.text_config["vocab_size"]
        self.cameras = make_cameras(spec.images, options["cameras"])
        source = options["tokenizer"]
        tokenizer = HashingTokenizer(vocab_size) if source is None else PretrainedTokenizer(source)
        if tokenizer.vocab_size > vocab_size + self.spare_tokens:
            raise ValueError(
                f"model.tokenizer={source!r} has {tokenizer.vocab_size} tokens, but the model knows {vocab_size}"
            )
        self.prompt = self.make_prompt(tokenizer, options["max_tokens"] or self.prompt_length)
        assert spec.state_dim is not None
        given = options["state_statistics"]
        state = StateStatistics("identity") if given is None else StateStatistics.from_dict(given)
        self.state_normalizer = Normalizer(state, spec.state_dim)
        given = options["action_statistics"]
        if given is None and options["pretrained"] is not None:
            raise ValueError(
                f"model.pretrained={options['pretrained']!r} has no statistics of its actions; set model.action_statistics "
                "to those it was trained with (mode and numbers, see vla_async.policies.processing.Statistics)"
            )
        bounds = (spec.action_low, spec.action_high)
        actions = ActionStatistics.of_bounds(*bounds) if given is None else ActionStatistics.from_dict(given)
        self.action_normalizer = Normalizer(actions, spec.action_dim)

    def observe(self, frames: TensorDictBase) -> None:
        """Normalise the state by the statistics of the demonstrations, unless others were given or came with the weights."""
        if self.hparams["state_statistics"] is None:
            measured = StateStatistics.measure(frames[keys.STATE].cpu(), self.state_mode)
            self.state_normalizer.load_state_dict(Normalizer(measured, frames[keys.STATE].shape[-1]).state_dict())

    def normalize_actions(self, chunk: Tensor) -> Tensor:
        return self.action_normalizer.normalize(chunk)

    def unnormalize_actions(self, chunk: Tensor) -> Tensor:
        return self.action_normalizer.unnormalize(chunk)

    def tokenize(self, instruction: str) -> Tensor:
        """The prompt, int64 ``[max_tokens]``."""
        return self.prompt.tokenize(instruction)

    def read_state(self, td: TensorDictBase) -> Tensor:
        """The normalised state, padded: float32 ``[B, max_state_dim]``."""
        return pad_last(self.state_normalizer.normalize(td[keys.STATE]), self.sizes.max_state_dim, "the state")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Create the modules, without the weights of a release: the checkpoint's follow."""
        self._restoring = True
        super().on_load_checkpoint(checkpoint)
        self._restoring = False


def make_sizes(kind: type[Any], overrides: Mapping[str, Any]) -> Any:
    """Build the sizes of a network.

    Raises:
        ValueError: names a size that does not exist, or that cannot work.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"model.config: {unknown} does not exist; there is {', '.join(names)}")
    return kind(**overrides)


def make_cameras(images: Mapping[str, tuple[int, int, int]], order: Sequence[str | None] | None) -> Cameras:
    """The model's cameras, see ``cameras`` of :class:`ReleasedFlowPolicy`."""
    names = list(images) if order is None else list(order)
    unknown = sorted({name for name in names if name is not None} - set(images))
    if unknown:
        raise ValueError(f"model.cameras: the envs have no {unknown}; they have {sorted(images)}")
    slots = tuple(f"camera {number + 1}" for number in range(len(names)))
    return Cameras(slots, images, dict(zip(slots, names, strict=True)), allow_missing=True)


def lerobot_statistics(folder: Path, modes: Mapping[str, str]) -> dict[str, Any]:
    """Statistics that LeRobot's processors keep in safetensors files beside the weights.

    Args:
        folder: of the release.
        modes: ``normalization_mapping`` of its ``config.json``.
    """
    found: dict[str, Any] = {}
    for ours, feature, kind in (
        ("state_statistics", "observation.state", "STATE"),
        ("action_statistics", "action", "ACTION"),
    ):
        for file in sorted(folder.glob("policy_*normalizer_processor.safetensors")):
            tensors = TensorFiles(file)
            plain = {name.removeprefix(f"{feature}."): name for name in tensors if name.startswith(f"{feature}.")}
            if plain and kind in modes:
                numbers = {name: tensors[full].flatten().tolist() for name, full in plain.items()}
                # LeRobot adds so much to a deviation or a range
                found[ours] = {**numbers, "mode": _MODES[modes[kind]], "eps": 1e-8}
    return found


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
            f"model.pretrained={options['pretrained']!r} needs the tokenizer it was trained with; set model.tokenizer to a "
            "folder, a tokenizer.json or a hub id"
        )
    for name, choices in (("freeze", get_args(Freeze)), ("dtype", get_args(WeightType))):
        if options[name] not in choices:
            raise ValueError(f"model.{name}={options[name]!r} is unknown: choose one of {list(choices)}")
    if options["max_tokens"] is not None and options["max_tokens"] < 1:
        raise ValueError(f"model.max_tokens={options['max_tokens']} must be at least 1")
    if options["cameras"] is not None and not any(options["cameras"]):
        raise ValueError(f"model.cameras={options['cameras']} shows the model nothing; name at least one camera of the envs")
    for name, kind in _STATISTICS.items():
        if options[name] is not None:
            cast("type[StateStatistics]", kind).from_dict(options[name])
