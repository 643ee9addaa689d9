"""The cases that rollout engines are compared on: envs, what a forward costs, and what is done besides."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from vla_async import keys
from vla_async.emulation import Constant, Duration, EmulatedEnvs, EmulatedPolicy, LogNormal, Uniform, ideal_rate
from vla_async.envs import EnvFactory, EnvSpec, ManiSkillEnvs

if TYPE_CHECKING:
    from vla_async.policies import TinyVLAPolicy

Form = Literal["chunked", "plain"]
"""How an engine sees the envs: as this library makes them, or as a TorchRL user writes one (``EmulatedEnvBase``)."""


@dataclass(frozen=True)
class Forward:
    """What one forward costs: ``flat_s + per_row_s * rows`` seconds of the device."""

    flat_s: float = 0.0
    per_row_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the comparison.

    Attributes:
        about: what it shows.
        envs: the envs.
        forward: what a forward of the emulated policy costs; None for a real one, ``TinyVLAPolicy``.
        frames_per_env: decisions per env and delivered batch.
        max_wait_s: Tmax of our own collector.
        payload_mb: unused parameters of the policy, in MB.
        publish_every_s: seconds from one publication of weights to the next; None for never.
    """

    about: str
    envs: EnvFactory
    forward: Forward | None
    frames_per_env: int = 32
    max_wait_s: float = 0.0
    payload_mb: float = 0.0
    publish_every_s: float | None = None

    def ideal(self, lockstep: bool = False) -> float | None:
        """Env steps/s without any overhead, or None where the costs are not known beforehand."""
        envs = self.envs
        if not isinstance(envs, EmulatedEnvs) or self.forward is None:
            return None
        costs = (envs.num_envs, envs.step_time, self.forward.flat_s, self.forward.per_row_s)
        return ideal_rate(*costs, chunk_size=envs.chunk_size, lockstep=lockstep, seconds=100.0)

    def make_policy(self, form: Form) -> TensorDictModuleBase | TinyVLAPolicy:
        """The policy for envs of that form."""
        if self.forward is None:
            from vla_async.policies import (
                TinyVLAPolicy,
            )  # here, or each spawned worker of each engine would import Lightning

            policy = TinyVLAPolicy()
            policy.build(spec_of(self.envs))
            return policy
        assert isinstance(self.envs, EmulatedEnvs)
        is_plain, envs = form == "plain", self.envs
        return EmulatedPolicy(
            (envs.action_dim,) if is_plain else (envs.chunk_size, envs.action_dim),
            flat_s=self.forward.flat_s,
            per_row_s=self.forward.per_row_s,
            observation_key="observation" if is_plain else keys.STATE,
            action_key="action" if is_plain else keys.CHUNK,
            payload_mb=self.payload_mb,
        )


class StatePolicy(TensorDictModuleBase):
    """A ``TinyVLAPolicy`` that knows its one instruction beforehand and declares its keys, as TorchRL's engines want it."""

    def __init__(self, policy: TinyVLAPolicy, instruction: str, form: Form) -> None:
        super().__init__()
        self.policy, self.is_plain = policy, form == "plain"
        self.in_keys = ["observation" if self.is_plain else keys.STATE]
        self.out_keys = ["action" if self.is_plain else keys.CHUNK, keys.LOG_PROB, keys.VALUE]
        self.register_buffer("tokens", policy.tokenize(instruction))

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Decide for one row or a batch of them."""
        state = tensordict.get(self.in_keys[0])
        rows = state.reshape(-1, state.shape[-1])
        seen = TensorDict({keys.STATE: rows, keys.INSTRUCTION_TOKENS: self.tokens.expand(len(rows), -1)}, [len(rows)])
        decided = self.policy.act(seen)
        for key, source in zip(self.out_keys, (keys.CHUNK, keys.LOG_PROB, keys.VALUE), strict=True):
            value = decided[source][:, 0] if key == "action" else decided[source]
            tensordict.set(key, value.reshape(*tensordict.batch_size, *value.shape[1:]))
        return tensordict


def spec_of(envs: EnvFactory) -> EnvSpec:
    """What the envs look like, found out in a process of its own, for a simulator may not survive a fork."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_spec, envs).result()


def _spec(envs: EnvFactory) -> EnvSpec:
    return envs.make(0).env_spec


def _sleeping(num_envs: int, step_time: Duration, cameras: int = 0) -> EmulatedEnvs:
    return EmulatedEnvs(num_envs=num_envs, step_time=step_time, cameras=cameras)


_JITTER, _DEVICE = Uniform(0.002, 0.02), Forward(0.005, 0.0001)


def _jitter(num_envs: int) -> Case:
    return Case(about="step time uniform 2-20 ms", envs=_sleeping(num_envs, _JITTER), forward=_DEVICE)


def _instant(num_envs: int) -> Case:
    return Case(about="neither steps nor forwards take time", envs=_sleeping(num_envs, Constant()), forward=Forward())


def _publish(about: str, every_s: float | None) -> Case:
    envs = _sleeping(16, _JITTER)
    return Case(about=about, envs=envs, forward=_DEVICE, frames_per_env=4, payload_mb=100.0, publish_every_s=every_s)


CASES: dict[str, Case] = {
    **{f"jitter-{num_envs}": _jitter(num_envs) for num_envs in (8, 16, 32, 64)},
    "heavy-tail-32": Case(
        about="step time log-normal, mean 20 ms, sigma 1", envs=_sleeping(32, LogNormal(0.02)), forward=_DEVICE
    ),
    "instant-env-16": Case(
        about="steps take no time, forward 5 ms",
        envs=_sleeping(16, Constant()),
        forward=Forward(0.005),
        max_wait_s=0.006,  # a forward: long enough for all envs to join the next one
    ),
    **{f"instant-{num_envs}": _instant(num_envs) for num_envs in (2, 16)},
    "cameras-16": Case(about="two 224 x 224 cameras, step 20 ms", envs=_sleeping(16, Constant(0.02), 2), forward=_DEVICE),
    "no-cameras-16": Case(about="the same without cameras", envs=_sleeping(16, Constant(0.02)), forward=_DEVICE),
    "maniskill-4": Case(
        about="ManiSkill PushCube-v1 with states, TinyVLAPolicy", envs=ManiSkillEnvs(task="PushCube-v1"), forward=None
    ),
    "publish-16": _publish("as jitter-16, and 100 MB of weights are published every 0.5 s", 0.5),
    "no-publish-16": _publish("the same, never published", None),
}
