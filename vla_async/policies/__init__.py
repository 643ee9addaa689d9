"""Policies: the contract (``VLAPolicy``) and the ones that come with the library."""

from vla_async.policies.base import StepOutput, VLAPolicy
from vla_async.policies.tiny import TinyVLAPolicy

__all__ = ["StepOutput", "TinyVLAPolicy", "VLAPolicy"]
