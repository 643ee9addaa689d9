"""``PolicyView``: what a policy is given of a pool's rows, and what is asked of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_async import keys
from vla_async.collectors.pool import EnvPool
from vla_async.policies.base import VLAPolicy


class PolicyView:
    """Turns rows of a pool into what a policy reads, and a policy's answer into a chunk for the pool.

    Each instruction is tokenized once.

    Args:
        pool: the envs.
        policy: reads on its own device.
    """

    def __init__(self, pool: EnvPool, policy: VLAPolicy) -> None:
        self.pool, self.policy = pool, policy
        self._tokens: dict[str, Tensor] = {}

    def see(self, observation: Mapping[str, Tensor], instructions: Sequence[str], request_keys: Tensor) -> TensorDict:
        """What the policy reads, on its device: a copy, since the rows are written to again.

        Args:
            observation: by name, each ``[N, ...]``.
            instructions: length N, those that belong to the observation.
            request_keys: int64 ``[N]``.

        Returns:
            TensorDict ``[N]``.
        """
        for text in set(instructions) - self._tokens.keys():
            self._tokens[text] = self.policy.tokenize(text)
        num = len(instructions)
        source = {
            keys.OBSERVATION: TensorDict({name: leaf.clone() for name, leaf in observation.items()}, batch_size=[num]),
            keys.INSTRUCTION_TOKENS: torch.stack([self._tokens[text] for text in instructions]),
            keys.REQUEST_KEY: request_keys.unsqueeze(-1),
        }
        return TensorDict(source, batch_size=[num]).to(self.policy.device)

    def chunk(self, decision: TensorDict) -> Tensor:
        """The policy's chunk, float32 ``[N, H, A]`` on the CPU.

        Raises:
            FloatingPointError: if an action is not finite; names the env, and what the policy had been given.
        """
        chunk: Tensor = decision.get(keys.CHUNK).float().cpu()
        finite = torch.isfinite(chunk).flatten(1).all(-1)
        if not bool(finite.all()):
            row = int(torch.nonzero(~finite)[0])
            pool = self.pool
            seen = {name: bool(torch.isfinite(leaf[row].float()).all()) for name, leaf in pool.rows.observation.items()}
            raise FloatingPointError(
                f"the policy's action for env {row} ({pool.tasks[row]!r}, instruction {pool.instructions[row]!r}) is not "
                f"finite; its observation was finite: {seen}"
            )
        return chunk
