"""Policies: the contract (``VLAPolicy``) and the ones that come with the library.

Those around a released model import its building blocks when they are built, not before.
"""

from vla_async.policies.base import StepOutput, VLAPolicy
from vla_async.policies.flow import FlowMatchingPolicy, ModelShape, Prefix
from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.lerobot import LeRobotPolicy
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.pi0 import Pi0Policy
from vla_async.policies.pi05 import Pi05Policy
from vla_async.policies.smolvla import SmolVLAPolicy
from vla_async.policies.tiny import TinyVLAPolicy

__all__ = [
    "FlowMatchingPolicy",
    "Gr00tPolicy",
    "LeRobotPolicy",
    "ModelShape",
    "OpenVLAOFTPolicy",
    "Pi0Policy",
    "Pi05Policy",
    "Prefix",
    "SmolVLAPolicy",
    "StepOutput",
    "TinyVLAPolicy",
    "VLAPolicy",
]
