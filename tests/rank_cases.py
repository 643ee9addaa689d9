"""Two ranks for the tests: rank 0 is the test's process, rank 1 another that does the same, as a launcher would start it.

In a module of its own because the other process imports it.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fakes import Metrics, make_trainer, tiny
from vla_async import keys
from vla_async.callbacks import Callback
from vla_async.collectors.pool import worker_context
from vla_async.envs import EnvFactory, ToyEnvs
from vla_async.loops import Loop, SFTLoop, StreamingFitLoop
from vla_async.objectives import GRPO, PPO, StepOutput
from vla_async.policies import TinyVLAPolicy
from vla_async.trainer import AsyncTrainer

LOCKSTEP: dict[str, Any] = {"train_async": False, "streamer": False, "async_interaction": False}


class Recording:
    """For an objective: keeps whose trajectories it prepares, and what of the statistics of all ranks it uses."""

    def prepare(self, trajectories: Any) -> Any:
        prepared = super().prepare(trajectories)  # type: ignore[misc]
        name = keys.GROUP_ID if keys.GROUP_ID in prepared.keys() else ("collector", "traj_ids")
        ids = prepared[name].reshape(len(prepared), -1)[:, 0]
        self.__dict__.setdefault("prepared", []).append(ids.tolist())
        return prepared


class RecordingPPO(Recording, PPO):
    pass


class RecordingGRPO(Recording, GRPO):
    pass


class Faulty(TinyVLAPolicy):
    """On one rank, the n-th training step goes wrong: it is ``killed``, ``raises``, or hangs until a file is there."""

    def __init__(self, rank: int, fault: str, at_call: int = 3) -> None:
        super().__init__(PPO(), hidden=(16, 16), vocab_size=64, instruction_dim=4)
        self.rank, self.fault, self.at_call, self.calls = rank, fault, at_call, 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> StepOutput:  # type: ignore[override]
        self.calls += 1
        if self.calls == self.at_call and os.environ.get("LOCAL_RANK") == str(self.rank):
            if self.fault == "killed":
                os.kill(os.getpid(), 9)
            if self.fault == "raises":
                raise KeyError("broken data")
            while not Path(self.fault).exists():
                time.sleep(0.05)
        return super().training_step(batch)


@dataclass
class Case:
    """A run, the same on each of its ranks."""

    root: Path
    strategy: Any = "auto"
    num_ranks: int = 1
    loop: Any = field(default_factory=lambda: LOCKSTEP)
    envs: EnvFactory = field(default_factory=lambda: ToyEnvs(num_envs=3, max_episode_steps=6))
    policy: Any = field(default_factory=dict)
    fault: tuple[int, str] | None = None
    max_steps: int = 3
    callbacks: tuple[Callback, ...] = ()  # of rank 0
    ckpt_path: str | None = None
    timeout_s: float = 60.0
    demonstrations: Path | None = None
    timeline: bool = False

    def run(self) -> tuple[AsyncTrainer, TinyVLAPolicy, dict[int, dict[str, float]]]:
        """Train; the trainer, its policy, and the metrics by step."""
        metrics = Metrics()
        fit_loop: Loop = StreamingFitLoop(**({"decisions_per_env": 3, "update_epochs": 2} | self.loop))
        sft_loop = (
            SFTLoop(self.demonstrations, max_steps=6, batch_size=7, log_every_n_steps=3) if self.demonstrations else None
        )
        trainer = make_trainer(
            self.root,
            fit_loop=fit_loop,
            sft_loop=sft_loop,
            max_steps=self.max_steps,
            strategy=self.strategy,
            num_ranks=self.num_ranks,
            rank_timeout_s=self.timeout_s,
            num_threads=1,
            timeline=self.timeline,
            callbacks=[metrics, *self.callbacks],
        )
        options: dict[str, Any] = {"objective": RecordingPPO(gamma=0.9), "lr": 1e-2} | copy.deepcopy(self.policy)
        policy = Faulty(*self.fault) if self.fault else tiny(**options)
        with pytest.raises(SystemExit, match="0") if os.environ.get("LOCAL_RANK") == "1" else nullcontext():
            (trainer.sft if self.demonstrations else trainer.fit)(policy, self.envs, ckpt_path=self.ckpt_path)
        return trainer, policy, metrics.steps


def environment(rank: int, port: int) -> dict[str, str]:
    """What a launcher would tell a rank."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", **meeting}


def be_rank(rank: int, case: Case, port: int) -> None:
    """Do the same as the others, and write down what came of it."""
    torch.set_num_threads(1)
    os.environ |= environment(rank, port)
    _, policy, _ = case.run()
    prepared = getattr(policy.objective, "prepared", [])
    torch.save({"weights": policy.state_dict(), "prepared": prepared}, case.root / f"rank{rank}.pt")


@contextmanager
def rank_1(case: Case) -> Iterator[BaseProcess]:
    """Rank 1 of a case, in the environment of whose rank 0 the block is; ended with the block."""
    port = free_port()
    case.root.mkdir(exist_ok=True)
    process = worker_context().Process(target=be_rank, args=(1, case, port))
    with mock.patch.dict(os.environ, environment(0, port)):
        process.start()
        try:
            yield process
        finally:
            process.join(20.0)
            process.kill()
            process.join()


@contextmanager
def both_ranks(case: Case) -> Iterator[list[BaseProcess]]:
    """Both ranks of a case, in processes of their own; ended with the block."""
    port = free_port()
    processes: list[BaseProcess] = [worker_context().Process(target=be_rank, args=(rank, case, port)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
