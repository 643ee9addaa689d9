"""What the tests of VLA policies share: tiny sizes, observations, and the check that no decision depends on its batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies import VLAPolicy

INSTRUCTIONS = ("push the cube", "put_the red bowl on the plate", "stack", "open the top drawer of the cabinet slowly")

SPEC = EnvSpec(
    (-1.0, -2.0, 0.0), (1.0, 2.0, 0.5), chunk_size=3, state_dim=5, images={"image": (3, 20, 24), "wrist": (3, 16, 16)}
)


def tiny_pi0_config() -> dict[str, Any]:
    """Sizes of a π0 or π0.5 of some ten thousand parameters."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "vision": vision | {"image_size": 28, "patch_size": 14},
        "text": heads | {"hidden_size": 24, "intermediate_size": 32, "vocab_size": 300},
        "expert": heads | {"hidden_size": 16, "intermediate_size": 24},
        "chunk_size": 5,
        "max_state_dim": 8,
        "max_action_dim": 6,
    }


def randomize(module: nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Make every weight matter, also gates and scales that begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def observations(policy: VLAPolicy, rows: int, seed: int = 7) -> TensorDict:
    """Rows that differ in image, state, length of the instruction and request key."""
    spec, generator = policy.env_spec, torch.Generator().manual_seed(seed)
    assert spec is not None
    td = TensorDict({}, batch_size=[rows])
    for name, shape in spec.images.items():
        td["observation", name] = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=generator)
    if spec.state_dim is not None:
        td[keys.STATE] = torch.randn(rows, spec.state_dim, generator=generator)
    texts = [INSTRUCTIONS[row % len(INSTRUCTIONS)] for row in range(rows)]
    td[keys.INSTRUCTION_TOKENS] = torch.stack([policy.tokenize(text) for text in texts])
    td[keys.REQUEST_KEY] = torch.arange(100, 100 + rows).unsqueeze(-1)
    return td


def assert_independent_of_the_batch(policy: VLAPolicy, rows: int = 17, tolerance: float = 1e-5) -> None:
    """Decisions, and what ``evaluate`` makes of them, are the same in batches of 1, 3 and all, and in any order."""
    whole = policy.act(observations(policy, rows))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    names = [name for name in (keys.CHUNK, keys.LOG_PROB, keys.VALUE) if name in whole.keys(True)]
    for size in (1, 3, rows):
        for part in order.split(size):
            asked = observations(policy, rows)[part]
            answered = policy.act(asked)
            for name in names:
                torch.testing.assert_close(answered[name], whole[name][part], rtol=tolerance, atol=tolerance)
            again = policy.evaluate(whole[part])
            for name in names[1:]:
                torch.testing.assert_close(again[name].detach(), whole[name][part], rtol=tolerance, atol=tolerance)
