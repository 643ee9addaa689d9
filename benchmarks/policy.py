r"""Seconds and memory of a policy's forward (``act``) and training step, by batch size.

    python -m benchmarks.policy                                      small networks, on this machine
    python -m benchmarks.policy --policies pi05 --size release --device cuda --precision bf16-mixed \
        --freeze vision --gradient-checkpointing --batch-sizes 1 8 32 --json policy.json

Networks have random weights, of the sizes of the public releases or much smaller ones. A training step recomputes the
log-prob of decisions that were acted, goes backward, and takes a step of the policy's own optimizer. Memory is the peak,
weights included: of what torch allocated on a GPU, of what the process grew by on a CPU. Each policy has its own process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from vla_async import keys
from vla_async.collectors.slab import human_bytes
from vla_async.envs import EnvSpec
from vla_async.monitor.report import Table
from vla_async.policies import VLAPolicy
from vla_async.policies.measuring import blank_observations, total_bytes

POLICIES = {
    "pi0": "pi0.Pi0Policy",
    "pi05": "pi05.Pi05Policy",
    "smolvla": "smolvla.SmolVLAPolicy",
    "gr00t": "gr00t.Gr00tPolicy",
    "openvla_oft": "openvla_oft.OpenVLAOFTPolicy",
}
# LIBERO's, as the published runs see it
SPEC = EnvSpec((-1.0,) * 7, (1.0,) * 7, 10, 8, {"image": (3, 256, 256), "wrist_image": (3, 256, 256)})

_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
_TEXT = _LAYERS | {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1000}
_EYE = {"image_size": 56, "patch_size": 14}
SMALL: dict[str, dict[str, Any]] = {
    "pi0": {"vision": _VISION | _EYE, "text": _TEXT, "expert": _LAYERS | {"hidden_size": 32, "intermediate_size": 128}},
    "smolvla": {
        "vision": _VISION | {"image_size": 64, "patch_size": 8},
        "text": {name: size for name, size in _TEXT.items() if name != "num_hidden_layers"},
        "image_size": 64,
        "num_vlm_layers": 4,
    },
    "gr00t": {
        "vision": _VISION | _EYE,
        "text": _TEXT,
        "dit_heads": 4,
        "dit_head_dim": 16,
        "dit_layers": 4,
        "context_heads": 4,
        "context_layers": 1,
        "hidden_size": 64,
        "future_tokens": 8,
    },
    "openvla_oft": {
        "dinov2": {name: size for name, size in (_VISION | _EYE).items() if name != "intermediate_size"},
        "siglip": _VISION | _EYE,
        "llama": {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
        | {"num_attention_heads": 4},
    },
}
SMALL["pi05"] = SMALL["pi0"]


@dataclass(frozen=True)
class Point:
    """One batch size of one policy.

    Attributes:
        policy: its name.
        batch_size: decisions.
        parameters: of the policy.
        trained: those that the optimizer steps.
        act_s: seconds of ``act``, the median.
        train_s: seconds of a training step, the median.
        act_bytes: peak memory of ``act``.
        train_bytes: peak memory of training steps.
    """

    policy: str
    batch_size: int
    parameters: int
    trained: int
    act_s: float
    train_s: float
    act_bytes: int
    train_bytes: int


class Peak:
    """The most memory that was taken since it was last reset.

    Args:
        device: whose memory.
        held: bytes of what is there already and shall count: the weights.
    """

    def __init__(self, device: torch.device, held: int) -> None:
        self.device = device
        self.base = self._now() - held

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else _status("VmRSS")

    def reset(self) -> None:
        """Begin anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes above the base."""
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else _status("VmHWM")
        return max(0, peak - self.base)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def make_policy(name: str, options: argparse.Namespace, device: torch.device) -> VLAPolicy:
    """A policy with random weights, on its device."""
    module, _, kind = POLICIES[name].rpartition(".")
    settings: dict[str, Any] = {"config": SMALL[name] if options.size == "small" else None, "freeze": options.freeze}
    settings |= {"dtype": options.dtype, "gradient_checkpointing": options.gradient_checkpointing}
    settings["lora"] = None if options.lora_rank is None else {"rank": options.lora_rank, "alpha": float(options.lora_rank)}
    if name == "openvla_oft":
        settings["value"] = True
    made: VLAPolicy = getattr(importlib.import_module(f"vla_async.policies.{module}"), kind)(**settings)
    with device:
        made.build(SPEC)
    return made.to(device)


def median_s(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of the seconds that something takes, after once for nothing."""
    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _act(policy: VLAPolicy, seen: TensorDictBase) -> TensorDictBase:
    return policy.act(seen.clone())


def _train(policy: VLAPolicy, optimizer: torch.optim.Optimizer, decisions: TensorDictBase, autocast: Any) -> None:
    with autocast():
        result = policy.evaluate(decisions)
        loss = result[keys.LOG_PROB].float().mean() + result[keys.VALUE].float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(name: str, options: argparse.Namespace) -> list[Point]:
    """All batch sizes of one policy."""
    device = torch.device(options.device)
    policy = make_policy(name, options, device)
    peak = Peak(device, total_bytes([*policy.parameters(), *policy.buffers()]))
    configured: Any = policy.configure_optimizers()
    bf16 = options.precision == "bf16-mixed"

    def autocast() -> Any:
        return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()

    sizes = [sum(p.numel() for p in policy.parameters() if p.requires_grad or not trained) for trained in (False, True)]
    points = []
    for rows in options.batch_sizes:
        seen = blank_observations(policy, rows, device)
        policy.eval()
        peak.reset()
        with autocast():
            act_s = median_s(partial(_act, policy, seen), options.repeats, device)
            act_bytes = peak.read()
            decisions = _act(policy, seen)
        policy.train()
        peak.reset()
        train_s = median_s(partial(_train, policy, configured, decisions, autocast), options.repeats, device)
        points.append(Point(name, rows, *sizes, act_s, train_s, act_bytes, peak.read()))
    return points


def print_table(points: Sequence[Point]) -> None:
    """Print what was measured."""
    header = ["policy", "parameters", "trained", "batch", "act ms", "train ms", "act memory", "train memory"]
    table = Table(header)
    for point in points:
        sizes = [f"{point.parameters / 1e6:.2f} M", f"{point.trained / 1e6:.2f} M", str(point.batch_size)]
        times = [f"{1000 * point.act_s:.1f}", f"{1000 * point.train_s:.1f}"]
        table.rows.append([point.policy, *sizes, *times, human_bytes(point.act_bytes), human_bytes(point.train_bytes)])
    table.print()


def _positive(text: str) -> int:
    """A number of the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def main(args: Sequence[str] | None = None) -> list[Point]:
    """Measure and print; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--size", choices=["small", "release"], default="small")
    parser.add_argument("--batch-sizes", nargs="+", type=_positive, default=[1, 4, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--freeze", choices=["none", "vision", "vlm"], default="none")
    parser.add_argument("--lora-rank", type=_positive, help="train low-rank additions only")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--repeats", type=_positive, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    if options.freeze == "vlm" and "openvla_oft" in options.policies:
        parser.error("--freeze vlm leaves nothing of openvla_oft to train; name the other --policies, or freeze vision")
    points = []
    for name in options.policies:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            points += process.submit(measure, name, options).result()
    print_table(points)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(point) for point in points], indent=1))
    return points


if __name__ == "__main__":
    main()
