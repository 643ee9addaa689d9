"""Objectives: algorithms that turn trajectories into a loss, and the pure functions that they are made of."""

from vla_async.objectives.advantages import AdvantageNormalizer, gae, group_advantages, vtrace
from vla_async.objectives.base import Objective, StepOutput
from vla_async.objectives.grpo import GRPO
from vla_async.objectives.ppo import PPO

__all__ = ["GRPO", "PPO", "AdvantageNormalizer", "Objective", "StepOutput", "gae", "group_advantages", "vtrace"]
