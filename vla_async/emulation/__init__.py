"""Emulated costs: envs and policies that sleep instead of compute, and the rate that no engine could exceed with them."""

from vla_async.emulation.device import DeviceLock, sleep_until
from vla_async.emulation.durations import Constant, Duration, LogNormal, Uniform
from vla_async.emulation.envs import EmulatedEnvBase, EmulatedEnvs, EmulatedSimulator
from vla_async.emulation.ideal import ideal_rate
from vla_async.emulation.policy import EmulatedPolicy
from vla_async.emulation.vla_policy import EmulatedVLAPolicy

__all__ = [
    "Constant",
    "DeviceLock",
    "Duration",
    "EmulatedEnvBase",
    "EmulatedEnvs",
    "EmulatedPolicy",
    "EmulatedSimulator",
    "EmulatedVLAPolicy",
    "LogNormal",
    "Uniform",
    "ideal_rate",
    "sleep_until",
]
