"""A small training run in a process of its own, for tests that end it from outside: ``python -m tests.faults.toy_run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.fakes import ClockEnvs, make_trainer, tiny
from tests.loops.validation_fakes import gated
from vla_async.collectors.pool import EnvPool
from vla_async.envs import ToyEnvs
from vla_async.loops import EvaluateLoop, StreamingFitLoop, SyncFitLoop

ENDLESS: dict[str, Any] = {"fit_loop": SyncFitLoop(decisions_per_env=3, update_epochs=1), "max_steps": -1}
STREAMING: dict[str, Any] = ENDLESS | {"fit_loop": StreamingFitLoop(decisions_per_env=3, update_epochs=1, max_staleness=2)}

BESIDE: dict[str, Any] = ENDLESS | {
    "val_every_n_steps": 1_000_000,
    "evaluate_loop": EvaluateLoop(num_episodes=2, num_videos=0, beside_training=True),
}


def main(root: Path, mode: str) -> None:
    """Train until someone ends it.

    In either loop, after an evaluation with a video; with an evaluation beside it that never ends; or with a worker that
    hangs.
    """
    if mode in ("endless", "streaming"):
        options = (ENDLESS if mode == "endless" else STREAMING) | {
            "val_every_n_steps": 1_000_000,
            "evaluate_loop": EvaluateLoop(num_episodes=2),
        }
        make_trainer(root, **options).fit(tiny(), ToyEnvs(num_envs=2))
    if mode == "beside":
        make_trainer(root, **BESIDE).fit(tiny(), gated(root / "gate"))
    if mode == "hanging":
        flag = str(root / "hangs")
        make_trainer(root, **ENDLESS).fit(tiny(), ClockEnvs(fault="hang-in-step", fault_env=1, fault_step=16, flag=flag))


def hold_a_hanging_pool(root: Path) -> None:
    """Open a pool of which one worker hangs, and wait for it."""
    with EnvPool(ClockEnvs(fault="hang-in-step", fault_env=1, flag=str(root / "hangs"))) as pool:
        (root / "workers").write_text(" ".join(str(link.process.pid) for link in pool._links))
        pool.reset(torch.tensor([True, True]), torch.tensor([0, 1]))
        pool.step(torch.zeros_like(pool.rows.chunk))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
