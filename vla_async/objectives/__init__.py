"""Objectives: algorithms that turn trajectories into a loss, and the pure functions that they are made of."""

from vla_async.objectives.advantages import AdvantageNormalizer, gae
from vla_async.objectives.base import Objective, StepOutput
from vla_async.objectives.ppo import PPO

__all__ = ["PPO", "AdvantageNormalizer", "Objective", "StepOutput", "gae"]
