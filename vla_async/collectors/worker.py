"""The process that steps envs. It owns one :class:`ChunkedEnv` and talks to its :class:`EnvPool` through shared rows.

Observations, actions and flags lie in tensors shared with the pool (:class:`Rows`), so a message only says what to do;
the reply carries the few things that are no tensors (instructions, task names, pictures).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_async.envs.base import EnvFactory, EnvSpec

if TYPE_CHECKING:
    from vla_async.envs.base import ChunkStep
    from vla_async.envs.chunked import ChunkedEnv
    from vla_async.envs.controllers import ScriptedController


@dataclass
class Rows:
    """What a pool and its workers share: one row per env, N in all.

    Attributes:
        observation: by name, ``[N, ...]``: what the next decision of each env sees.
        final_observation: by name, ``[N, ...]``: what the last decision led to, before any reset.
        chunk: float32 ``[N, H, A]``, the actions to execute (and, with a controller, those that were).
        active: bool ``[N]``, the envs that take part in a command.
        reset_after: bool ``[N]``, the envs that start a new episode as soon as theirs ends.
        seeds: int64 ``[N]``, seed of the next episode of each env.
        step_rewards: float32 ``[N, H]``.
        executed: bool ``[N, H]``.
        success: bool ``[N]``.
        success_once: bool ``[N]``.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
    """

    observation: dict[str, Tensor]
    final_observation: dict[str, Tensor]
    chunk: Tensor
    active: Tensor
    reset_after: Tensor
    seeds: Tensor
    step_rewards: Tensor
    executed: Tensor
    success: Tensor
    success_once: Tensor
    terminated: Tensor
    truncated: Tensor

    @classmethod
    def allocate(cls, num_rows: int, spec: EnvSpec) -> Rows:
        """Zeroed rows in shared memory, freed with the last process that maps them."""

        def shared(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
            rows: Tensor = torch.zeros(num_rows, *shape, dtype=dtype).share_memory_()
            return rows

        def observation() -> dict[str, Tensor]:
            leaves = {name: shared(*shape, dtype=torch.uint8) for name, shape in spec.images.items()}
            return leaves if spec.state_dim is None else leaves | {"state": shared(spec.state_dim, dtype=torch.float32)}

        return cls(
            observation=observation(),
            final_observation=observation(),
            chunk=shared(spec.chunk_size, spec.action_dim, dtype=torch.float32),
            active=shared(),
            reset_after=shared(),
            seeds=shared(dtype=torch.int64),
            step_rewards=shared(spec.chunk_size, dtype=torch.float32),
            executed=shared(spec.chunk_size),
            success=shared(),
            success_once=shared(),
            terminated=shared(),
            truncated=shared(),
        )

    def part(self, rows: slice) -> Rows:
        """The same memory, narrowed to one worker's rows."""

        def cut(value: Any) -> Any:
            return {name: leaf[rows] for name, leaf in value.items()} if isinstance(value, dict) else value[rows]

        return Rows(**{name: cut(value) for name, value in vars(self).items()})


@dataclass
class Ready:
    """A worker's first message: its env is built."""

    spec: EnvSpec
    num_rows: int


@dataclass
class Reply:
    """What a worker answers to a command; a traceback means that it has ended.

    Attributes:
        episodes: row within the worker to (instruction, task), for the rows that started an episode.
        frames: uint8 ``[H, W, 3]`` pictures of row 0, one per executed env step, if the env records. Arrays, because a
            tensor would travel as an open file of its own, and an episode has more pictures than a process may have files.
        error: the worker's own traceback.
        is_arithmetic: whether the error says that something was computed which is not finite, or the like.
    """

    episodes: dict[int, tuple[str, str]] = field(default_factory=dict)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    error: str | None = None
    is_arithmetic: bool = False


class _Worker:
    def __init__(self, env: ChunkedEnv, rows: Rows, controller: ScriptedController | None) -> None:
        self.env, self.rows, self.controller = env, rows, controller

    def reset(self, mask: Tensor) -> Reply:
        """Start an episode in the rows of ``mask``, from ``rows.seeds``."""
        on = self.env.simulator.device
        observation = self.env.reset_rows(mask.to(on), self.rows.seeds.to(on))
        self._write(self.rows.observation, observation)
        if self.controller is not None:
            self.controller.reset(self.env.simulator)
        instructions, tasks = self.env.simulator.instructions, self.env.simulator.tasks
        return Reply({row: (instructions[row], tasks[row]) for row in torch.nonzero(mask).flatten().tolist()})

    def step(self) -> Reply:
        """Execute one decision of the active rows, then reset those that ended and may go on."""
        rows, on = self.rows, self.env.simulator.device
        if self.controller is not None:
            rows.chunk.copy_(self.controller.act(self.env.simulator).unsqueeze(1))
        result = self.env.step_chunk(rows.chunk.to(on), rows.active.to(on))
        self._write(rows.final_observation, result.observation)
        self._write(rows.observation, result.observation)
        self._write_flags(result)
        ended = (rows.terminated | rows.truncated) & rows.active & rows.reset_after
        reply = self.reset(ended) if bool(ended.any()) else Reply()
        # a batch goes on while any of its rows does, and so do its pictures
        reply.frames = [frame.cpu().numpy() for frame in result.frames[: int(result.executed[0].sum())]]
        return reply

    def _write_flags(self, result: ChunkStep) -> None:
        for name in ("step_rewards", "executed", "success", "success_once", "terminated", "truncated"):
            getattr(self.rows, name).copy_(getattr(result, name))

    @staticmethod
    def _write(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
        for name, leaf in target.items():
            leaf.copy_(source[name])


class Reporting:
    """Tells the pool of any error inside the block, by its traceback, and ends the worker."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            told = "".join(traceback.format_exception(error))
            self.link.send(Reply(error=told, is_arithmetic=isinstance(error, ArithmeticError)))
            raise SystemExit(1) from None


def _die_with_parent() -> None:
    """Let the kernel end this process when the pool's ends: a worker that hangs would not notice.

    The parent holds the other end of the sentinel pipe, whose closing raises SIGIO here, and that nobody handles. (The
    kernel's own parent-death signal does not help: the parent is the fork server, which lives as long as a worker does.)
    """
    parent = multiprocessing.parent_process()
    if parent is not None and sys.platform == "linux":
        sentinel = parent.sentinel
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def leave_signals_to_parent() -> None:
    """Let the parent alone decide when this process ends, and the kernel when the parent is gone.

    On Ctrl-C, and where a scheduler signals all processes of a job at once, the signal reaches this process too.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def run_worker(
    link: Connection, factory: EnvFactory, index: int, render: bool, controller: ScriptedController | None
) -> None:
    """Body of the worker process: build the env, then serve commands until the pool hangs up.

    Commands are ``("reset", record)`` and ``("step",)``; ``None`` ends the worker.
    """
    leave_signals_to_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        with Reporting(link):
            env = factory.make(index, render)
            link.send(Ready(env.env_spec, env.num_rows))
        try:
            _serve(link, _Worker(env, link.recv(), controller))
        finally:
            env.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone, so nobody is left to tell


def _serve(link: Connection, worker: _Worker) -> None:
    while (command := link.recv()) is not None:
        with Reporting(link):
            if command[0] == "reset":
                worker.env.recording = command[1]
                reply = worker.reset(worker.rows.active)
            else:
                reply = worker.step()
        link.send(reply)
