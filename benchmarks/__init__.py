"""vla_async measured beside what TorchRL offers; each benchmark runs alone: ``python -m benchmarks.rollout --help``."""
