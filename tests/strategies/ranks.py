"""Ranks for the tests of strategies: processes that run a function together, and a small model for them.

In a module of its own because the processes import it.
"""

from __future__ import annotations

import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

COLUMNS = 5


class Model(LightningModule):
    """An actor and a critic over shared blocks, with what is awkward for ranks: odd sizes, frozen parts and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(COLUMNS, 7), nn.Linear(7, 3)])
        self.actor, self.critic, self.frozen = nn.Linear(3, 2), nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))  # smaller than the number of ranks
        self.register_buffer("calls", torch.zeros(1))

    def training_step(self, rows: Tensor, target: Tensor, valid: Tensor, part: str = "both") -> Tensor:
        self.calls += 1
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        loss = (self.critic(rows) + self.frozen(rows) - target).float().pow(2)
        if part == "both":
            loss = loss + (self.actor(rows) * self.scale).float().pow(2).sum(-1, keepdim=True)
        return (loss.squeeze(-1) * valid).sum()


@dataclass(frozen=True)
class MicroBatch:
    """Rows [first, first + size) of the data, and which part of the loss they have."""

    first: int
    size: int
    part: str = "both"

    def loss(self, model: Any, data: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
        rows, target, valid = (tensor[self.first : self.first + self.size] for tensor in data)
        return model.training_step(rows, target, valid, self.part), int(valid.sum())


def make_data(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [rows, COLUMNS], targets [rows, 1] and which rows are valid, about two thirds."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(rows, generator=generator) < 0.67
    valid[0] = True
    x, y = torch.randn(rows, COLUMNS, generator=generator), torch.randn(rows, 1, generator=generator)
    return x, y, valid


Step = list[list[MicroBatch]]  # the micro-batches of each rank


def make_step(sizes: list[list[int]], parts: list[str] | None = None) -> Step:
    """One optimizer step from the sizes of each rank's micro-batches; ``parts`` says what part each rank's loss has."""
    first, step = 0, []
    for rank, of_rank in enumerate(sizes):
        step.append([])
        for size in of_rank:
            step[-1].append(MicroBatch(first, size, parts[rank] if parts else "both"))
            first += size
    return step


def as_one_batch(step: Step) -> list[MicroBatch]:
    """All rows of a step in one batch; in two, if the parts of the loss differ."""
    batch: list[MicroBatch] = []
    for micro_batch in (micro_batch for of_rank in step for micro_batch in of_rank):
        if batch and batch[-1].part == micro_batch.part:
            batch[-1] = MicroBatch(batch[-1].first, batch[-1].size + micro_batch.size, micro_batch.part)
        else:
            batch.append(micro_batch)
    return batch


def random_steps(seed: int, ranks: int) -> list[Step]:
    """A few optimizer steps, each split in some way, with empty ranks among them."""
    draw, steps = random.Random(seed), []
    for _ in range(draw.randint(1, 4)):
        sizes = [[draw.randint(1, 6) for _ in range(draw.choice([0, 1, 1, 2, 5]))] for _ in range(ranks)]
        sizes[draw.randrange(ranks)].append(2)
        steps.append(make_step(sizes))
    return steps


def message_of(function: Callable[[], Any]) -> str:
    """What it refuses with, as ``type: text``; empty if it does not."""
    try:
        function()
    except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_ranks(count: int, function: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Any]:
    """Run ``function(rank, *args)`` in ``count`` processes of one process group.

    Returns:
        For each rank what it returned, the text of what it raised, or its negative signal if it was killed.

    Raises:
        TimeoutError: if they are not done within ``limit`` seconds; they are killed.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.strategies.measures"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    starts = [(rank, count, port, sending, function, args) for rank, (_, sending) in enumerate(pipes)]
    processes = [context.Process(target=_be_rank, args=start) for start in starts]
    give_up = time.monotonic() + limit
    try:
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        outcomes = []
        for process, (receiving, _) in zip(processes, pipes, strict=True):
            if not receiving.poll(max(0.0, give_up - time.monotonic())):
                raise TimeoutError(f"the ranks hang; so far {outcomes}")
            try:
                outcomes.append(receiving.recv())
            except EOFError:
                process.join()
                outcomes.append(process.exitcode)
        return outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_rank(rank: int, count: int, port: int, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        pipe.send(function(rank, *args))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
