"""``TinyVLAPolicy``: state, cameras and instruction in, a chunk of actions out, with a few 100k parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_async import keys
from vla_async.envs.base import EnvFactory, EnvSpec
from vla_async.monitor.metric_table import SFT_NLL, SFT_SQUARED_ERROR
from vla_async.objectives.base import Objective, StepOutput
from vla_async.policies.base import VLAPolicy
from vla_async.policies.encoders import ObservationEncoder, hash_words, mlp
from vla_async.policies.heads import ActionHead, GaussianHead, TokenHead
from vla_async.policies.optimizers import actor_critic_adamw

_MIN_STATE_STD = 1e-2  # an element that never moved in the demonstrations must not explode when it does


class TinyVLAPolicy(VLAPolicy):
    """A policy small enough to train on two CPU cores.

    Actor and critic share nothing, so that an untrained critic cannot spoil an actor that imitation has trained.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        hidden: widths of the hidden layers, of the actor and of the critic.
        head: ``gaussian`` (a mean per action element and a learned deviation) or ``tokens`` (bins per action element).
        num_bins: bins per action element of the token head.
        use_images: whether cameras are seen; ``auto`` sees all that the envs have.
        image_dim: features per camera.
        instruction_dim: length of a word embedding.
        vocab_size: number of word embeddings, into which words are hashed.
        max_words: longest instruction, in words.
        init_std: deviation of the Gaussian head at the start, as a share of half the action range.
        min_std: its lower limit.
        max_std: its upper limit.
        lr: learning rate.
        critic_lr: learning rate of the critic; ``lr`` by default.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay, on weight matrices only.
    """

    state_mean: Tensor
    state_std: Tensor

    def __init__(
        self,
        objective: Objective | None = None,
        hidden: Sequence[int] = (256, 256),
        head: Literal["gaussian", "tokens"] = "gaussian",
        num_bins: int = 21,
        use_images: bool | Literal["auto"] = "auto",
        image_dim: int = 64,
        instruction_dim: int = 32,
        vocab_size: int = 1024,
        max_words: int = 32,
        init_std: float = 0.5,
        min_std: float = 0.05,
        max_std: float = 1.0,
        lr: float = 3e-4,
        critic_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "objective", "__class__")}
        _check(arguments)
        super().__init__(objective)
        # named explicitly: under LightningCLI the default would store the parser's view of them, objective included
        self.save_hyperparameters(arguments | {"hidden": list(hidden), "betas": list(betas)})

    def check_env(self, env: EnvFactory) -> None:
        """Refuse envs that show nothing this policy looks at, before any is built."""
        names = env.observation_names
        if names is not None:
            self._check_sight("state" in names, sorted(names - {"state"}))

    def _check_sight(self, has_state: bool, cameras: list[str]) -> None:
        use_images = self.hparams["use_images"]
        if use_images is True and not cameras:
            raise ValueError("model.use_images=true, but the envs have no camera; choose an env.obs with rgb, or auto")
        if not has_state and not (use_images and cameras):
            raise ValueError(
                f"nothing to see: the envs give no state, and model.use_images={use_images} with cameras {cameras}; "
                "choose an env.obs with state or rgb, and model.use_images=auto"
            )

    def build(self, spec: EnvSpec) -> None:
        """Create the modules for envs that look like ``spec``; without effect for the same spec again.

        Raises:
            ValueError: if there is nothing to see, a camera is asked for and there is none, tokens are asked for and the
                actions are unbounded, or the policy was built for other envs.
        """
        if self.env_spec is not None:
            if self.env_spec != spec:
                raise ValueError(f"the policy was built for {self.env_spec}, so it cannot serve {spec}; make a new one")
            return
        options = self.hparams
        self._check_sight(spec.state_dim is not None, sorted(spec.images))
        cameras = {name: shape[0] for name, shape in spec.images.items()} if options["use_images"] else {}
        self.head: ActionHead
        if options["head"] == "tokens":
            self.head = TokenHead(spec, options["num_bins"])
        else:
            self.head = GaussianHead(spec, options["init_std"], options["min_std"], options["max_std"])
        self._shape = (spec.chunk_size, spec.action_dim, self.head.outputs)

        def encoder() -> ObservationEncoder:
            dims = (options["image_dim"], options["vocab_size"], options["instruction_dim"])
            return ObservationEncoder(spec.state_dim, cameras, *dims)

        self.actor_encoder, self.critic_encoder = encoder(), encoder()
        sizes = [self.actor_encoder.dim, *options["hidden"]]
        # a first policy that hardly depends on the observation explores evenly (Andrychowicz et al., arXiv 2006.05990)
        self.actor = mlp([*sizes, spec.chunk_size * spec.action_dim * self.head.outputs], output_gain=0.01)
        self.critic = mlp([*sizes, 1], output_gain=1.0)
        self.register_buffer("state_mean", torch.zeros(spec.state_dim or 0))
        self.register_buffer("state_std", torch.ones(spec.state_dim or 0))
        self.env_spec = spec

    def observe(self, frames: TensorDictBase) -> None:
        """Normalise the state by the statistics of the demonstrations."""
        if self.actor_encoder.has_state:
            state = frames[keys.STATE].float()
            self.set_statistics(state.mean(0).to(self.device), state.std(0, correction=0).to(self.device))

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Normalise the state by these statistics, for example those of the demonstrations.

        Without them, the state is only compressed (symlog). Call it before training: it changes what the policy sees.

        Args:
            mean: ``[state_dim]``.
            std: ``[state_dim]``; at least 0.01 is used.

        Raises:
            ValueError: if the shapes do not fit or a number is not finite.
        """
        for name, value in {"mean": mean, "std": std}.items():
            if value.shape != self.state_mean.shape or not torch.isfinite(value).all():
                raise ValueError(f"{name} of the state must be {list(self.state_mean.shape)} finite numbers, not {value}")
        self.state_mean.copy_(mean)
        self.state_std.copy_(std.clamp(min=_MIN_STATE_STD))

    def tokenize(self, instruction: str) -> Tensor:
        """Hash the words of an instruction, int64 ``[max_words]``, padded with 0."""
        return hash_words(instruction, self.hparams["vocab_size"], self.hparams["max_words"])

    def _see(self, td: TensorDictBase) -> tuple[dict[str, Tensor], Tensor]:
        """What the encoders take: the observations by name, with the state normalised, and the tokens."""
        if self.env_spec is None:
            raise RuntimeError("the policy has no modules yet; call build(env.env_spec) first")
        observation = {name: td["observation", name] for name in self.actor_encoder.cameras}
        if self.actor_encoder.has_state:
            observation["state"] = (td[keys.STATE] - self.state_mean) / self.state_std
        return observation, td[keys.INSTRUCTION_TOKENS]

    def _act_outputs(self, observation: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        outputs: Tensor = self.actor(self.actor_encoder(observation, tokens))
        return outputs.reshape(*outputs.shape[:-1], *self._shape)

    def _value(self, observation: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        value: Tensor = self.critic(self.critic_encoder(observation, tokens))
        return value.float()

    @torch.no_grad()
    def act(self, td: TensorDictBase) -> TensorDictBase:
        """Decide; see :meth:`VLAPolicy.act`. Without a request key the noise is torch's global generator's."""
        seen = self._see(td)
        outputs = self._act_outputs(*seen)
        if exploration_type() in (None, ExplorationType.RANDOM):
            request_keys = td.get(keys.REQUEST_KEY, None)
            decision = self.head.sample(outputs, None if request_keys is None else request_keys.squeeze(-1))
        else:
            decision = self.head.mode(outputs)
        for name, value in decision.items():
            td.set(("vla_action", name), value)
        td.set(keys.LOG_PROB, self.head.log_prob(outputs, decision["chunk"]))
        return td.set(keys.VALUE, self._value(*seen))

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        """Log-prob, entropy and value of stored decisions, with gradient; see :meth:`VLAPolicy.evaluate`."""
        seen = self._see(td)
        outputs = self._act_outputs(*seen)
        log_prob, entropy = self.head.log_prob(outputs, td[keys.CHUNK]), self.head.entropy(outputs)
        result = {keys.LOG_PROB: log_prob, keys.ENTROPY: entropy, keys.VALUE: self._value(*seen)}
        return TensorDict(result, batch_size=td.batch_size)

    def imitation_step(self, batch: TensorDictBase) -> StepOutput:
        """Behaviour cloning, padding left out.

        The Gaussian head clones the mean by its squared error: the likelihood would also shrink the deviation to the
        demonstrator's, and reinforcement learning could no longer explore. The token head maximises the likelihood.
        """
        outputs = self._act_outputs(*self._see(batch))
        chunk, valid = batch[keys.CHUNK], ~batch[keys.ACTION_IS_PAD].unsqueeze(-1)
        if isinstance(self.head, GaussianHead):
            name, error = SFT_SQUARED_ERROR, self.head.squared_error(outputs, chunk)
        else:
            name, error = SFT_NLL, -self.head.log_prob(outputs, chunk)
        count = int(valid.sum()) * chunk.shape[-1]
        loss = torch.where(valid, error, 0.0).sum()
        return StepOutput(loss, count, {name: (loss.detach(), float(count))})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with the actor and the critic in groups of their own and weight decay on matrices only."""
        return actor_critic_adamw(self, "critic", self.hparams)


def _check(options: Mapping[str, Any]) -> None:
    """Refuse values that cannot work: the error names the field, the value and the fix."""

    def check(name: str, valid: bool, fix: str) -> None:
        if not valid:
            raise ValueError(f"model.{name}={options[name]!r} {fix}")

    check("hidden", all(width >= 1 for width in options["hidden"]), "must be positive widths, for example [256, 256]")
    check("head", options["head"] in ("gaussian", "tokens"), "is unknown: choose gaussian or tokens")
    check("num_bins", options["num_bins"] >= 2, "must be at least 2")
    check("use_images", options["use_images"] in (True, False, "auto"), "is unknown: choose true, false or auto")
    for name in ("image_dim", "instruction_dim", "max_words"):
        check(name, options[name] >= 1, "must be at least 1")
    check("vocab_size", options["vocab_size"] >= 2, "must be at least 2")
    check("min_std", options["min_std"] > 0.0, "must be positive")
    check("max_std", options["max_std"] > options["min_std"], f"must be above model.min_std={options['min_std']}")
    inside = options["min_std"] < options["init_std"] < options["max_std"]
    limits = f"model.min_std={options['min_std']} and model.max_std={options['max_std']}"
    check("init_std", inside, f"must lie between {limits}, not on them")
    for name in ("lr", "critic_lr"):
        check(name, options[name] is None or options[name] >= 0.0, "must not be negative")
    check("betas", all(0.0 <= beta < 1.0 for beta in options["betas"]), "must lie in [0, 1)")
    check("weight_decay", options["weight_decay"] >= 0.0, "must not be negative")
