"""One run of the comparison, in a process of its own; see ``sample_efficiency.py``.

python -m benchmarks.learning_run '{"task": "toy_ppo", "eta": 1, "correction": "none", "seed": 0}' RECORD DIRECTORY
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning_cases import TASKS, TIMEOUT_S, LearningTask, Setting
from vla_async import AsyncTrainer
from vla_async.callbacks import Callback
from vla_async.loops import EvaluateLoop
from vla_async.policies import VLAPolicy


@dataclass
class Marks(Callback):
    """Keeps a copy of the policy at the first update that reaches each mark, and what was logged of the age of the data.

    The copies are evaluated after the run: an evaluation during it would take its cores, and an asynchronous run would go on
    rolling out meanwhile, for nothing.

    Args:
        marks: env steps, ascending.
    """

    marks: Sequence[int]
    kept: list[tuple[dict[str, float], VLAPolicy]] = field(default_factory=list)
    ages: list[tuple[float, float]] = field(default_factory=list)

    def on_start(self, trainer: AsyncTrainer) -> None:
        self._started = time.perf_counter()
        self._keep(trainer, 0)

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self.ages.append((metrics.get("staleness/mean", 0.0), metrics["staleness/max"]))
        while len(self.kept) <= len(self.marks) and trainer.state.counters.env_steps >= self.marks[len(self.kept) - 1]:
            self._keep(trainer, self.marks[len(self.kept) - 1])

    def _keep(self, trainer: AsyncTrainer, mark: int) -> None:
        counters, wall_s = trainer.state.counters, time.perf_counter() - self._started
        where = {"mark": mark, "env_steps": counters.env_steps, "updates": counters.step, "wall_s": round(wall_s, 3)}
        self.kept.append((where, copy.deepcopy(trainer.policy).requires_grad_(False)))


def run(task: LearningTask, setting: Setting, directory: Path, init_from: str | None = None) -> dict[str, Any]:
    """Train as the setting says, evaluate the policy of every mark, and say how it went.

    Args:
        task: what to train.
        setting: how.
        directory: for the run's files.
        init_from: checkpoint to start from.

    Returns:
        The setting, the staleness that was met (mean and max after the first η updates, until which it can only rise), and
        for each mark the env steps and seconds of training before it and the successes of ``episodes`` episodes.
    """
    policy, env, marks = task.policy(setting.correction), task.env(), Marks(task.marks)
    trainer = AsyncTrainer(
        fit_loop=task.loop(setting),
        max_env_steps=task.marks[-1],
        seed=setting.seed,
        root_dir=directory,
        init_from=init_from,
        accelerator="cpu",
        num_threads=1,
        callbacks=[marks],
    )
    trainer.fit(policy, env)
    # a process takes seconds to start, and no more of them than cores work at a time; episodes do not depend on it
    held_out = env if env.is_batched else dataclasses.replace(env, num_envs=min(env.num_envs, os.cpu_count() or 1))
    # an episode that has succeeded once needs no more steps
    evaluate = EvaluateLoop(num_episodes=task.episodes, on_success="terminate", num_videos=0, timeout_s=TIMEOUT_S)
    try:
        points = []
        for where, kept in marks.kept:
            successes = evaluate.run(kept, held_out, "validate").success().successes
            points.append({**where, "successes": successes, "episodes": task.episodes})
    finally:
        evaluate.close()
    settled = marks.ages[setting.eta :]
    return {
        **dataclasses.asdict(setting),
        "staleness_mean": sum(mean for mean, _ in settled) / len(settled),
        "staleness_max": max(most for _, most in settled),
        "points": points,
    }


def main() -> None:
    """Run the setting of the command line, and write the record."""
    setting, record, directory, *init_from = sys.argv[1:]
    given = Setting(**json.loads(setting))
    found = run(TASKS[given.task], given, Path(directory), *init_from)
    Path(record).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
