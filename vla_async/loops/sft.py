"""``SFTLoop``: supervised fine-tuning, that is behaviour cloning of demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vla_async.data.demonstrations import Demonstrations
from vla_async.envs.base import EnvSpec
from vla_async.loops.base import Loop
from vla_async.monitor import metric_table as names
from vla_async.monitor.metrics import Meter
from vla_async.rng import fold

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer


class SFTLoop(Loop):
    """Trains a policy to repeat what demonstrations did.

    Consumes: a dataset of demonstrations.
    Waits for: nothing; the data is on disk.
    Produces: a policy to start reinforcement learning from.
    Unblocked by: nothing.

    Args:
        directory: the dataset, as ``vla-async collect`` writes it.
        max_episodes: use only the first so many episodes; all by default.
        max_steps: optimizer steps.
        batch_size: decisions per optimizer step; several ranks share them out.
        micro_batch_size: decisions per forward and backward, to fit memory; does not change the result.
        max_grad_norm: gradients are clipped to this norm; null for no clipping.
        log_every_n_steps: steps that one row of metrics covers.
    """

    stage = "sft"

    def __init__(
        self,
        directory: Path = Path("demonstrations"),
        max_episodes: int | None = None,
        max_steps: int = 500,
        batch_size: int = 128,
        micro_batch_size: int | None = None,
        max_grad_norm: float | None = 1.0,
        log_every_n_steps: int = 20,
    ) -> None:
        counts = {"max_steps": max_steps, "batch_size": batch_size, "log_every_n_steps": log_every_n_steps}
        optional = {"max_episodes": max_episodes, "micro_batch_size": micro_batch_size}
        for name, value in (counts | optional).items():
            if value is not None and value < 1:
                raise ValueError(f"sft_loop.{name}={value} must be at least 1")
        if micro_batch_size is not None and micro_batch_size > batch_size:
            raise ValueError(f"sft_loop.micro_batch_size={micro_batch_size} is larger than sft_loop.batch_size={batch_size}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"sft_loop.max_grad_norm={max_grad_norm} must be positive, or null for no clipping")
        self.directory, self.max_episodes, self.max_steps = Path(directory), max_episodes, max_steps
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.max_grad_norm, self.log_every_n_steps = max_grad_norm, log_every_n_steps
        self._data: Demonstrations | None = None

    def check(self, trainer: AsyncTrainer) -> None:
        """Open the dataset, before anything else is started.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is broken, or shows something else than the envs.
        """
        self._data = Demonstrations(self.directory, trainer.env.chunk_size, self.max_episodes)
        self._data.check_env(trainer.env)
        if self.batch_size < trainer.ranks.settings.num_ranks:
            raise ValueError(
                f"sft_loop.batch_size={self.batch_size} leaves some of trainer.num_ranks={trainer.ranks.settings.num_ranks} "
                "ranks without data; raise it, or lower trainer.num_ranks"
            )

    def open(self, trainer: AsyncTrainer) -> EnvSpec:
        """Say what the demonstrations show."""
        assert self._data is not None
        return self._data.spec

    def run(self, trainer: AsyncTrainer) -> None:
        """Take ``max_steps`` optimizer steps; step ``i`` has a random batch of its own, so a resumed run sees the same."""
        assert self._data is not None
        data, counters, meter, ranks = self._data, trainer.state.counters, Meter(), trainer.ranks
        tokens = data.tokens(trainer.policy)
        if counters.step == 0:
            trainer.policy.observe(data.frames)
        trainer.policy.train()
        while counters.step < self.max_steps:
            generator = torch.Generator().manual_seed(fold(trainer.seed, "sft", counters.step) % 2**63)
            indices = torch.randint(data.num_frames, (self.batch_size,), generator=generator)
            batch = data.decisions(indices[ranks.rank :: ranks.settings.num_ranks], tokens).to(trainer.fabric.device)
            for micro in batch.split(self.micro_batch_size or self.batch_size):
                with trainer.fabric.autocast():
                    output = trainer.module.imitation_step(micro)
                trainer.fabric.backward(output.loss, num_samples=output.num_samples)
                meter.add(output.metrics)
            with trainer.interrupts.critical():
                norm = trainer.optimizer_step(self.max_grad_norm)
                counters.step += 1
            meter.add({names.GRAD_NORM: (torch.tensor(norm), 1.0)})
            if counters.step % self.log_every_n_steps == 0 or counters.step == self.max_steps:
                trainer.state.gather()
                means = ranks.merged(meter).means()
                if ranks.is_first:
                    trainer.end_step(means)
                meter = Meter()
