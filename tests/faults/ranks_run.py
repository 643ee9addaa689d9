"""A run on two ranks, of which it starts the second itself: ``python -m tests.faults.ranks_run <directory>``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fakes import make_trainer, tiny
from vla_async.envs import ToyEnvs
from vla_async.loops import StreamingFitLoop


def main(root: Path) -> None:
    """Train until someone ends it; each rank writes down its process id."""
    (root / f"rank{os.environ.get('LOCAL_RANK', '0')}.pid").write_text(str(os.getpid()))
    loop = StreamingFitLoop(decisions_per_env=3, update_epochs=1)
    ranks = {"strategy": "size_weighted_ddp", "num_ranks": 2}
    make_trainer(root, fit_loop=loop, num_threads=1, **ranks).fit(tiny(), ToyEnvs(num_envs=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
