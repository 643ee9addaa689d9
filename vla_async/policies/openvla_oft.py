"""``OpenVLAOFTPolicy``: a chunk of action tokens in one pass of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.monitor.metric_table import SFT_NLL
from vla_async.objectives.base import Objective, StepOutput
from vla_async.policies.action_bins import ActionBins, Gripper, of_bins, sample_bins
from vla_async.policies.adapters import LoRA, choose_trained
from vla_async.policies.base import VLAPolicy
from vla_async.policies.checkpoints import TensorFiles, cast_weights, find_checkpoint, load_mapped
from vla_async.policies.flow_value import ValueHead
from vla_async.policies.images import Cameras, center_crop, to_unit_range
from vla_async.policies.optimizers import actor_critic_adamw, check_optimizer
from vla_async.policies.prismatic import (
    KEY_MAP,
    ActionOutputs,
    Attention,
    PrismaticNetwork,
    PrismaticShape,
    merge_sizes,
    unfuse,
)
from vla_async.policies.processing import ActionStatistics, Normalizer, StateStatistics, Statistics, read_statistics
from vla_async.policies.tokenizer import HashingTokenizer, PretrainedTokenizer, PromptTokenizer, action_question


class OpenVLAOFTPolicy(VLAPolicy):
    """OpenVLA-OFT with discrete actions (arXiv 2502.19645): DINOv2 and SigLIP, a Llama, and 256 bins per action element.

    All H * A tokens are made in one pass, each independent of the others given what is seen. The log-prob of each is that of
    the action bins alone, at ``temperature``, and the same function gives it in sampling and in training.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        pretrained: folder or hub id of a release's weights, in safetensors; None starts from random ones.
        config: sizes that differ from the release's, by part (``dinov2``, ``siglip``, ``llama``, ``actions``), see
            :data:`~vla_async.policies.prismatic.RELEASE`.
        dataset: whose statistics of the release to use (``dataset_statistics.json``, or ``norm_stats`` of ``config.json``).
        action_statistics: the statistics themselves, instead; without either, the envs' action bounds are used.
        state_statistics: of the state, if ``use_state``; those of ``dataset`` by default.
        use_state: whether the state is seen, as a token of its own.
        gripper: what the last action element means to the model.
        cameras: the envs' cameras that are seen, in the model's order; all of them, ``image`` first, by default.
        image_crop: share of each image's surface that is seen, its middle; 0.9 for models trained with random crops.
        tokenizer: folder or hub id; ``pretrained``'s own by default, and one that hashes words without ``pretrained``.
        max_prompt_tokens: L, the longest prompt.
        attention: see :class:`~vla_async.policies.prismatic.PrismaticShape`.
        temperature: of sampling, and of the log-prob; imitation has none.
        value: whether there is a critic; it reads the mean hidden state of the action tokens.
        value_hidden: widths of its hidden layers.
        detach_value: whether it reads without moving what it reads.
        freeze: what is not trained: ``none`` or ``vision``.
        lora: fields of :class:`~vla_async.policies.adapters.LoRA`: of what ``freeze`` leaves, train low-rank additions to
            the linear layers, the state's projection and the critic only. The token's output layer stays as it is.
        gradient_checkpointing: whether the Llama's layers are computed again in the backward pass instead of kept.
        dtype: type of the network's weights; the critic and the statistics are always float32.
        lr: learning rate.
        critic_lr: learning rate of the critic; ``lr`` by default.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay, on weight matrices only.
    """

    def __init__(
        self,
        objective: Objective | None = None,
        pretrained: str | None = None,
        config: dict[str, dict[str, Any]] | None = None,
        dataset: str | None = None,
        action_statistics: dict[str, Any] | None = None,
        state_statistics: dict[str, Any] | None = None,
        use_state: bool = False,
        gripper: Gripper = "as_is",
        cameras: Sequence[str] | None = None,
        image_crop: float = 1.0,
        tokenizer: str | None = None,
        max_prompt_tokens: int = 64,
        attention: Attention = "bidirectional",
        temperature: float = 1.0,
        value: bool = False,
        value_hidden: Sequence[int] = (512, 128),
        detach_value: bool = True,
        freeze: Literal["none", "vision"] = "none",
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        lr: float = 2e-5,
        critic_lr: float | None = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "objective", "__class__")}
        _check(arguments)
        LoRA.read(lora, objective)
        super().__init__(objective)
        lists = {name: list(arguments[name]) for name in ("cameras", "value_hidden", "betas") if arguments[name] is not None}
        # named explicitly: under LightningCLI the default would store the parser's view of them, objective included
        self.save_hyperparameters(arguments | lists)
        self._sizes = merge_sizes(config or {})
        self._restoring = False
        self.value_head: ValueHead | None = None

    # ---------------------------------------------------------------- building

    def check_env(self, env: EnvFactory) -> None:
        """Refuse envs that show no camera, or no state where it is asked for, before any is built."""
        if (names := env.observation_names) is not None:
            self._check_sight("state" in names, bool(names - {"state"}))

    def _check_sight(self, has_state: bool, has_camera: bool) -> None:
        if not has_camera:
            raise ValueError("cameras: the envs have none, but the model needs images; choose an env.obs with rgb")
        if self.hparams["use_state"] and not has_state:
            raise ValueError("model.use_state=true, but the envs give no state; choose an env.obs with state")

    def build(self, spec: EnvSpec) -> None:
        """Create the modules for envs that look like ``spec``; without effect for the same spec again.

        Raises:
            ValueError: if a camera or a statistic is missing or does not fit, the actions are unbounded and there are no
                statistics, the weights do not fit, or the policy was built for other envs.
        """
        if self.env_spec is not None:
            if self.env_spec != spec:
                raise ValueError(f"the policy was built for {self.env_spec}, so it cannot serve {spec}; make a new one")
            return
        options = self.hparams
        self._check_sight(spec.state_dim is not None, bool(spec.images))
        self.cameras = Cameras.of(spec.images, options["cameras"])
        state_dim = spec.state_dim if options["use_state"] else None
        folder = None if options["pretrained"] is None or self._restoring else find_checkpoint(options["pretrained"])
        actions = Normalizer(self._statistics(ActionStatistics, "action", folder, spec), spec.action_dim)
        if state_dim is not None:
            self.state_normalizer = Normalizer(
                self._statistics(StateStatistics, "proprio", folder, spec), state_dim, clip=1.0
            )
        network = PrismaticNetwork(
            self._sizes, PrismaticShape(spec.chunk_size * spec.action_dim, state_dim, options["attention"])
        )
        self.bins = ActionBins(actions, network.num_bins, options["gripper"])
        self._shape = (spec.chunk_size, spec.action_dim)
        cast_weights(network, getattr(torch, options["dtype"]))
        if folder is not None:
            load_mapped(network, unfuse(_weights(folder, state_dim is not None), self._sizes), KEY_MAP)
        frozen = [network.vision] if options["freeze"] == "vision" else []
        whole = [part for part in [network.state_projector] if part is not None]
        choose_trained(network, options["lora"], frozen=frozen, whole=whole, uncalled=[network.lm_head])
        if options["gradient_checkpointing"]:
            network.language.activation_checkpointing_enable()
        self.network = network
        if options["value"]:
            self.value_head = ValueHead(network.dim, options["value_hidden"], options["detach_value"])
        self.env_spec = spec

    def _statistics(self, kind: type[Statistics], entry: str, folder: Path | None, spec: EnvSpec) -> Statistics:
        """Those that were given, else the release's, else the action bounds; a checkpoint's replace whatever is built."""
        given = self.hparams["action_statistics" if kind is ActionStatistics else "state_statistics"]
        if given is not None:
            return kind.from_dict({"mode": "quantiles", "eps": 1e-8} | given)
        if self._restoring:
            return kind(mode="identity")
        if self.hparams["dataset"] is not None and folder is not None:
            file, names = folder / "dataset_statistics.json", (self.hparams["dataset"], entry)
            found = (
                read_statistics(file, *names)
                if file.is_file()
                else read_statistics(folder / "config.json", "norm_stats", *names)
            )
            return kind.from_dict({"eps": 1e-8} | found, "quantiles")
        if folder is None and kind is ActionStatistics:
            return ActionStatistics.of_bounds(spec.action_low, spec.action_high)
        name = "action_statistics" if kind is ActionStatistics else "state_statistics"
        raise ValueError(f"{kind.kind} are missing: set model.{name}, or model.dataset to one that model.pretrained knows")

    @property
    def prompt(self) -> PromptTokenizer:
        """What makes the prompt of an instruction."""
        if not hasattr(self, "_prompt"):
            source, size = self.hparams["tokenizer"] or self.hparams["pretrained"], self._sizes["llama"]["vocab_size"]
            tokenizer = HashingTokenizer(size) if source is None else PretrainedTokenizer(source)
            if tokenizer.vocab_size > size:
                raise ValueError(f"model.tokenizer={source!r} has {tokenizer.vocab_size} tokens, but the model knows {size}")
            self._prompt = action_question(tokenizer, self.hparams["max_prompt_tokens"])
        return self._prompt

    def tokenize(self, instruction: str) -> Tensor:
        """The tokens of the question for the instruction's actions, int64 ``[max_prompt_tokens]``."""
        return self.prompt.tokenize(instruction)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Create the modules without the release's weights, for the checkpoint's fill them."""
        self._restoring = True
        super().on_load_checkpoint(checkpoint)
        self._restoring = False

    # ---------------------------------------------------------------- deciding

    def _run(self, td: TensorDictBase) -> ActionOutputs:
        if self.env_spec is None:
            raise RuntimeError("the policy has no modules yet; call build(env.env_spec) first")
        crop = self.hparams["image_crop"]
        images = [center_crop(to_unit_range(image), crop) for image in self.cameras.read(td)[0]]
        state = self.state_normalizer.normalize(td[keys.STATE]) if self.hparams["use_state"] else None
        tokens = td[keys.INSTRUCTION_TOKENS]
        outputs: ActionOutputs = self.network(images, tokens, self.prompt.mask(tokens), state)
        return outputs

    def _log_probs(self, outputs: ActionOutputs, temperature: float) -> Tensor:
        """Of every bin, ``[B, H, A, bins]``: the one function that both sampling and training use."""
        logits = outputs.logits.reshape(-1, *self._shape, outputs.logits.shape[-1])
        return torch.log_softmax(logits / temperature, dim=-1)

    def _value(self, outputs: ActionOutputs) -> dict[Any, Tensor]:
        return {} if self.value_head is None else {keys.VALUE: self.value_head(outputs.features.float().mean(1))}

    @torch.no_grad()
    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide; see :meth:`VLAPolicy.act`. It also writes the bins, ``keys.TOKENS``, that :meth:`evaluate` reads."""
        outputs = self._run(rows := td.reshape(-1))
        log_probs = self._log_probs(outputs, self.hparams["temperature"])
        if exploration_type() in (None, ExplorationType.RANDOM):
            request_keys = rows.get(keys.REQUEST_KEY, None)
            bins = sample_bins(log_probs, None if request_keys is None else request_keys.squeeze(-1))
        else:
            bins = log_probs.argmax(-1)
        result = {keys.TOKENS: bins, keys.CHUNK: self.bins.decode(bins), keys.LOG_PROB: of_bins(log_probs, bins)}
        for key, value in (result | self._value(outputs)).items():
            td.set(key, value.reshape(*td.batch_size, *value.shape[1:]))
        return td

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        """Log-prob, entropy and value of stored decisions, with gradient; see :meth:`VLAPolicy.evaluate`."""
        outputs = self._run(rows := td.reshape(-1))
        log_probs = self._log_probs(outputs, self.hparams["temperature"])
        result = {
            keys.LOG_PROB: of_bins(log_probs, rows[keys.TOKENS]),
            keys.ENTROPY: -(log_probs.exp() * log_probs).sum(-1),
        }
        return TensorDict(result | self._value(outputs), batch_size=rows.batch_size).reshape(td.batch_size)

    def imitation_step(self, batch: TensorDictBase) -> StepOutput:
        """Cross entropy of the bins of the demonstrated actions, padding left out."""
        log_probs = self._log_probs(self._run(batch), 1.0)
        nll = -of_bins(log_probs, self.bins.encode(batch[keys.CHUNK]))
        valid = ~batch[keys.ACTION_IS_PAD].unsqueeze(-1)
        count = int(valid.sum()) * nll.shape[-1]
        loss = torch.where(valid, nll, 0.0).sum()
        return StepOutput(loss, count, {SFT_NLL: (loss.detach(), float(count))})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of what is not frozen, with the model and the critic in groups of their own."""
        return actor_critic_adamw(self, "value_head.", self.hparams)


def _weights(folder: Path, with_state: bool) -> Mapping[str, Tensor]:
    """The release's tensors; its state projector may lie in a file of its own."""
    tensors: Mapping[str, Tensor] = TensorFiles(folder)
    beside = folder / "proprio_projector.safetensors" if folder.is_dir() else None
    if with_state and beside is not None and beside.is_file():
        named = {f"proprio_projector.{name.removeprefix('module.')}": value for name, value in TensorFiles(beside).items()}
        return dict(tensors) | named
    return tensors


def _check(options: Mapping[str, Any]) -> None:
    """Refuse values that cannot work: the error names the field, the value and the fix."""

    def check(name: str, valid: bool, fix: str) -> None:
        if not valid:
            raise ValueError(f"model.{name}={options[name]!r} {fix}")

    choices = {
        "gripper": ("as_is", "open_is_one"),
        "attention": ("bidirectional", "causal"),
        "freeze": ("none", "vision"),
        "dtype": ("float32", "bfloat16"),
    }
    for name, allowed in choices.items():
        check(name, options[name] in allowed, f"is unknown: choose {' or '.join(allowed)}")
    check("temperature", 0.0 < options["temperature"] < float("inf"), "must be positive")
    check("image_crop", 0.0 < options["image_crop"] <= 1.0, "must lie in (0, 1]")
    check("max_prompt_tokens", options["max_prompt_tokens"] >= 1, "must be at least 1")
    check("value_hidden", all(width >= 1 for width in options["value_hidden"]), "must be positive widths")
    both = options["dataset"] is not None and options["action_statistics"] is not None
    check("dataset", not both, "and model.action_statistics are two answers to one question; set one of them")
    check(
        "dataset", options["dataset"] is None or options["pretrained"] is not None, "needs model.pretrained, which knows it"
    )
    check_optimizer(check, options)
