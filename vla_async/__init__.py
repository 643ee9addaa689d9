"""Asynchronous reinforcement-learning post-training of Vision-Language-Action policies."""

__version__ = "0.1.0"
