"""Envs: what a set of envs is (``EnvFactory``) and the ones that come with the library."""

from vla_async.envs.base import ChunkStep, EnvFactory, EnvSpec, SimStep, Simulator
from vla_async.envs.chunked import ChunkedEnv
from vla_async.envs.libero import LiberoEnvs
from vla_async.envs.maniskill import ManiSkillEnvs
from vla_async.envs.toy import ToyEnvs

__all__ = [
    "ChunkStep",
    "ChunkedEnv",
    "EnvFactory",
    "EnvSpec",
    "LiberoEnvs",
    "ManiSkillEnvs",
    "SimStep",
    "Simulator",
    "ToyEnvs",
]
