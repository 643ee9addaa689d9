"""Our side: reads the checkpoints and inputs that LeRobot's side wrote, and what it makes of our exports, and compares."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from parity import cases
from vla_async import keys
from vla_async.envs.base import EnvSpec
from vla_async.policies.flow import FlowMatchingPolicy
from vla_async.policies.flow_sampling import Draws


@dataclass(frozen=True)
class GivenNoise(Draws):
    """Hands out given noise in place of random numbers."""

    noise: Tensor

    def normal(self, *shape: int, stream: int) -> Tensor:
        return self.noise


def make(name: str, **options: Any) -> FlowMatchingPolicy:
    """Our policy, from LeRobot's checkpoint, in which its processors have left the statistics."""
    folder = cases.FOLDER / name
    images = {camera: tuple(load_file(folder / "case.safetensors")[camera].shape[1:]) for camera in cases.CAMERAS}
    policy = choose(name, folder, options)
    policy.build(EnvSpec(cases.ACTION_LOW, cases.ACTION_HIGH, cases.HORIZON, cases.STATE_DIM, images))  # type: ignore[arg-type]
    policy.eval()
    return policy


def trained(name: str) -> FlowMatchingPolicy:
    """The policy that is exported: with weights of its own, and low-rank additions."""
    policy = make(name, lora={"rank": 2, "alpha": 4.0})
    cases.randomize(policy, seed=5)
    return policy


def choose(name: str, folder: Path, options: dict[str, Any]) -> FlowMatchingPolicy:
    """The policy's class and settings."""
    shared: dict[str, Any] = {"pretrained": str(folder / "checkpoint"), "tokenizer": str(folder / "tokenizer")}
    shared |= {"num_steps": cases.NUM_STEPS, "noise": "ode", "value": None, **options}
    if name == "smolvla":
        from vla_async.policies.smolvla import SmolVLAPolicy

        config = {"vision": cases.SMOLVLA_VISION, "text": cases.SMOLVLA_TEXT, "scale_factor": cases.SMOLVLA_SCALE_FACTOR}
        return SmolVLAPolicy(config=config, **shared)
    if name == "groot":
        from vla_async.policies.gr00t import Gr00tPolicy

        config = {"vision": cases.GROOT_VISION, "text": cases.GROOT_TEXT}
        for ours, theirs in (("state_statistics", "observation.state"), ("action_statistics", "action")):
            shared[ours] = {**cases.STATISTICS[theirs], "mode": "min_max", "eps": 0.0}
        return Gr00tPolicy(config=config, embodiment=cases.GROOT_EMBODIMENT, max_tokens=80, **shared)
    from vla_async.policies.pi0 import Pi0Policy
    from vla_async.policies.pi05 import Pi05Policy

    config = {"vision": cases.PI_VISION, "text": cases.PI_TEXT, "expert": cases.PI_EXPERT}
    kind: Any = Pi0Policy if name == "pi0" else Pi05Policy
    made: FlowMatchingPolicy = kind(config=config, **shared)
    return made


def compare(title: str, policy: FlowMatchingPolicy, folder: Path) -> dict[str, float]:
    """The relative errors of one policy, by what is compared."""
    theirs, said = load_file(folder / "case.safetensors"), json.loads((folder / "case.json").read_text())
    td = TensorDict({("observation", camera): theirs[camera] for camera in cases.CAMERAS}, batch_size=[len(cases.ROWS)])
    td[keys.STATE] = theirs["state"]
    td[keys.INSTRUCTION_TOKENS] = torch.stack([policy.tokenize(text) for text in said["instructions"]])
    with torch.no_grad():
        prefix = policy.prefix(td)
        steps = zip(theirs["x_t"], theirs["times"], strict=True)
        velocity = torch.stack([policy.velocity(prefix, x_t, time) for x_t, time in steps])
        draws = GivenNoise(len(td), prefix.features.device, None, theirs["noise"])
        field = functools.partial(policy.velocity_and_features, prefix)
        sampled = policy.exploration.sample(field, draws, explore=False)
    errors = {}
    for time, made, expected in zip(theirs["times"], velocity, theirs["velocity"], strict=True):
        errors[f"velocity, t = {float(time[0]):.2f}"] = cases.relative_error(made, expected)
    errors["chunk"] = cases.relative_error(sampled.chunk, theirs["chunk"])
    errors["actions"] = cases.relative_error(policy.unnormalize_actions(sampled.chunk), theirs["actions"])
    least = check_sensitivity(title, theirs["velocity"])
    print(f"{title} ({said['with']}; every input changes the velocity by {least:.1e} or more)")
    return errors


def check_sensitivity(title: str, velocity: Tensor) -> float:
    """The smallest share by which one of the inputs changes LeRobot's velocity.

    Raises:
        RuntimeError: names an input that changes too little.
    """
    changes = [cases.relative_error(velocity[:, row], velocity[:, 0]) for row in range(1, len(cases.ROWS))]
    for changed, change in zip(cases.ROWS[1:], changes, strict=True):
        if change < cases.SENSITIVITY:
            raise RuntimeError(f"{title}: {changed} changes LeRobot's velocity by {change:.1e} only; choose other weights")
    return min(changes)


def report(title: str, policy: FlowMatchingPolicy, folder: Path) -> float:
    """Print the relative errors of one policy, and return the largest."""
    errors = compare(title, policy, folder)
    for what, error in errors.items():
        print(f"    {what:<18} {error:.1e}{'' if error <= cases.TOLERANCE else '   differs'}")
    return max(errors.values())


def main() -> int:
    """Compare the models named on the command line, all by default; 1 if one of them differs."""
    worst = 0.0
    for name in sys.argv[1:] or cases.MODELS:
        worst = max(worst, report(name, make(name), cases.FOLDER / name))
        if name in cases.EXPORTED:
            worst = max(worst, report(f"our export of {name}", trained(name), cases.FOLDER / name / cases.ANSWERS))
    print(f"largest relative error: {worst:.1e} (at most {cases.TOLERANCE:.0e} is allowed)")
    return int(worst > cases.TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
