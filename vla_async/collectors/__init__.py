"""Rollouts: env workers, and the collectors that drive them."""
