"""PPO in plain TorchRL, with TorchRL's collector or with ours: one line is another.

    python examples/torchrl_ppo.py --collector torchrl
    python examples/torchrl_ppo.py --collector ours

The task is TorchRL's toy: move a marker onto a target. An episode ends there or after 20 steps; its return is minus the sum
of the distances.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase, ExcludeTransform, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from vla_async.collectors import StreamingCollector

STATE = ("observation", "state")


def make_env() -> EnvBase:
    """The env, without the parts of an observation that this policy does not read."""
    env = TransformedEnv(ToyVLAEnv(action_dim=2, state_dim=4, success_steps=2, success_tol=0.15))
    for transform in (ExcludeTransform(("observation", "image"), "language_instruction"), StepCounter(20), RewardSum()):
        env.append_transform(transform)
    return env


def net(*last: nn.Module) -> nn.Sequential:
    """A small network on the state."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), *last)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; returns the mean return of the episodes that ended in each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collector", choices=["torchrl", "ours"], default="ours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--frames", type=int, default=20_480, help="env steps in all")
    parser.add_argument("--max-in-flight", type=int, default=1, help="ours: 1 collects between updates, 2 also during them")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    spec = make_env().action_spec
    head = AddStateIndependentNormalScale(2, scale_mapping="biased_softplus_0.3")
    module = TensorDictModule(net(nn.Linear(64, 2), head), [STATE], ["loc", "scale"])
    bounded = {"distribution_class": TanhNormal, "distribution_kwargs": {"low": spec.low, "high": spec.high}}
    actor = ProbabilisticActor(module, in_keys=["loc", "scale"], spec=spec, return_log_prob=True, **bounded)
    critic = ValueOperator(net(nn.Linear(64, 1)), in_keys=[STATE])
    advantage = GAE(gamma=0.9, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=1e-3, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1024), sampler=SamplerWithoutReplacement(), batch_size=256)

    options = {"frames_per_batch": 1024, "total_frames": args.frames}
    if args.collector == "torchrl":
        collector = Collector(SerialEnv(args.num_envs, make_env), actor, auto_register_policy_transforms=False, **options)
    else:
        collector = StreamingCollector([make_env] * args.num_envs, actor, max_in_flight=args.max_in_flight, **options)
    collector.set_seed(args.seed)

    returns = list[float]()
    for batch in collector:
        with torch.no_grad():
            advantage(batch)
        buffer.extend(batch.reshape(-1))
        for part in (part for _ in range(4) for part in buffer):
            losses = loss_module(part)
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
        collector.update_policy_weights_()
        returns.append(float(batch["next", "episode_reward"][batch["next", "done"]].mean()))
        print(f"{len(returns) * 1024:6d} env steps: return {returns[-1]:6.2f}", flush=True)
    collector.shutdown()
    return returns


if __name__ == "__main__":
    main()
