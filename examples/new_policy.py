"""A new flow-matching policy in 30 lines, trained by PPO on the toy task.

    python examples/new_policy.py --noise flow_sde
    python examples/new_policy.py --noise flow_noise

The model is invented: words and state become the tokens of a prefix, and a small network reads from their mean where each
noisy action should go. docs/add_a_policy.md walks through it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_async import AsyncTrainer, keys
from vla_async.envs import EnvSpec, ToyEnvs
from vla_async.loops import EvaluateLoop, SyncFitLoop
from vla_async.objectives import PPO, Objective
from vla_async.policies.encoders import hash_words, mlp
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape, Prefix

NUM_WORDS, MAX_WORDS = 256, 16


class InventedPolicy(FlowMatchingPolicy):
    """Sees the state and the instruction.

    Args:
        objective: what reinforcement learning optimises; None to imitate or evaluate only.
        width: of the tokens and of the hidden layers.
        **flow: the options of every flow-matching policy.
    """

    def __init__(self, objective: Objective | None = None, width: int = 64, **flow: Any) -> None:
        super().__init__(objective, **flow)
        self.save_hyperparameters({"width": width})

    def build_model(self, spec: EnvSpec) -> ModelShape:
        if spec.state_dim is None:
            raise ValueError("InventedPolicy needs a state; choose an env.obs with state")
        width, chunk = self.hparams["width"], spec.chunk_size * spec.action_dim
        self.words = nn.Embedding(NUM_WORDS, width, padding_idx=0)
        self.see = nn.Linear(spec.state_dim, width)
        self.trunk = mlp([width + chunk + 1, width, spec.chunk_size * width], output_gain=2.0**0.5)
        self.read = mlp([width, spec.action_dim], output_gain=0.1)
        return ModelShape(spec.chunk_size, spec.action_dim, prefix_dim=width, suffix_dim=width)

    def tokenize(self, instruction: str) -> Tensor:
        return hash_words(instruction, NUM_WORDS, MAX_WORDS)

    def prefix(self, td: TensorDictBase) -> Prefix:
        words = td[keys.INSTRUCTION_TOKENS]
        tokens = torch.cat([self.see(td[keys.STATE]).unsqueeze(1), self.words(words)], dim=1)
        mask = nn.functional.pad(words != 0, (1, 0), value=True)
        return Prefix(tokens, mask, cache=tokens[:, 0] + self.words(words).mean(1))

    def velocity(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity_and_features(prefix, x_t, t)[0]

    def velocity_and_features(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([prefix.cache, x_t.flatten(1), t.unsqueeze(1)], dim=1)
        features = torch.tanh(self.trunk(seen)).unflatten(1, (x_t.shape[1], -1))
        return self.read(features), features


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and say what it was worth on held-out episodes before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", choices=["flow_sde", "flow_noise"], default="flow_sde")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    # Flow-Noise's log-prob is a mean over K + 1 terms, so the path's ratio is clipped at the (K + 1)-th power of this
    lr, clip = (2e-3, 0.2) if args.noise == "flow_sde" else (1e-3, 0.05)
    objective = PPO(gamma=0.9, clip_low=clip, clip_high=clip)
    # a model that knows nothing yet explores more widely than a pretrained one, whose noise_std is the default
    policy = InventedPolicy(objective, noise=args.noise, noise_std=(0.1, 0.5), lr=lr, critic_lr=2e-3)
    trainer = AsyncTrainer(
        fit_loop=SyncFitLoop(decisions_per_env=16, update_epochs=4, mini_batch_size=128),
        evaluate_loop=EvaluateLoop(num_episodes=50),
        max_steps=args.updates,
        val_every_n_steps=args.updates,
        seed=args.seed,
        name=f"new_policy_{args.noise}",
    )
    trainer.fit(policy, ToyEnvs(num_envs=16, batched=True, chunk_size=2))


if __name__ == "__main__":
    main()
