"""What is trained to compare the loops: three tasks, and the settings of each.

Every task is small enough that a run takes about a minute, and hard enough that learning is seen between its marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.full_age import FullAgeFitLoop
from vla_async.envs import EnvFactory, ManiSkillEnvs, ToyEnvs
from vla_async.loops import Loop, StreamingFitLoop, SyncFitLoop
from vla_async.objectives import GRPO, PPO
from vla_async.objectives.base import Objective
from vla_async.objectives.losses import Correction
from vla_async.policies import TinyVLAPolicy

Pace = Literal["full_age", "free"]
"""Of an asynchronous run: ``full_age`` trains on nothing younger than η, ``free`` on what comes, as users have it."""
TIMEOUT_S = 24 * 3600.0  # a comparison may be stopped for hours and continued: that is no hanging env
PUSHCUBE = Path(__file__).resolve().parent.parent / "recipes" / "maniskill_pushcube_sft_ppo.yaml"


@dataclass(frozen=True, order=True)
class Setting:
    """One run: what is trained, and how.

    Attributes:
        task: name of a :class:`LearningTask`.
        eta: η; 0 is the synchronous loop.
        correction: what is done about the age of the data.
        seed: of everything.
        pace: see :data:`Pace`.
    """

    task: str
    eta: int
    correction: Correction
    seed: int
    pace: Pace = "full_age"

    @property
    def name(self) -> str:
        """Without the seed, for a table."""
        if self.eta == 0:
            return "synchronous"
        return f"η = {self.eta}" + ("" if self.correction == "none" else f", {self.correction}")


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """A task with its policy and its batches.

    Attributes:
        about: what it is.
        env: makes the envs.
        objective: makes the objective with a correction.
        model: of the policy.
        batch: settings of every loop: what an update consumes.
        marks: env steps at which the policy is evaluated; the last one ends the run.
        episodes: held-out episodes per mark.
        streaming: settings of :class:`StreamingFitLoop` beside ``batch``.
        recipe: whose ``sft`` makes the weights that all runs start from; None for a fresh policy.
    """

    about: str
    env: Callable[[], EnvFactory]
    objective: Callable[[Correction], Objective]
    model: dict[str, Any]
    batch: dict[str, Any]
    marks: tuple[int, ...]
    episodes: int
    streaming: dict[str, Any] = dataclasses.field(default_factory=dict)
    recipe: Path | None = None

    def policy(self, correction: Correction) -> TinyVLAPolicy:
        """A new policy with its objective."""
        return TinyVLAPolicy(objective=self.objective(correction), **self.model)

    def loop(self, setting: Setting) -> Loop:
        """The fit loop of a setting.

        The synchronous loop is ``SyncFitLoop``; where that would cut episodes that the objective needs whole, it is
        ``StreamingFitLoop`` with all switches off.
        """
        settings = self.batch | {"env_timeout_s": TIMEOUT_S}
        if setting.eta == 0 and not self.objective("none").needs_whole_episodes:
            return SyncFitLoop(**settings)
        settings |= self.streaming
        if setting.eta == 0:
            return StreamingFitLoop(**settings, train_async=False, streamer=False, async_interaction=False)
        kind = FullAgeFitLoop if setting.pace == "full_age" else StreamingFitLoop
        return kind(**settings, max_staleness=setting.eta)


def _marks(last: int, number: int) -> tuple[int, ...]:
    return tuple(last * mark // number for mark in range(1, number + 1))


TASKS = {
    "toy_ppo": LearningTask(
        about="PPO on the toy task",
        env=lambda: ToyEnvs(num_envs=16, batched=True, chunk_size=2),
        objective=lambda correction: PPO(gamma=0.9, correction=correction),
        model={"hidden": [64, 64], "init_std": 0.3, "lr": 1e-3},
        batch={"decisions_per_env": 8, "update_epochs": 4, "mini_batch_size": 64},
        marks=_marks(18_000, 6),
        episodes=100,
    ),
    "toy_grpo": LearningTask(
        about="GRPO on the toy task",
        env=lambda: ToyEnvs(num_envs=32, batched=True, chunk_size=2),
        objective=lambda correction: GRPO(group_size=8, correction=correction),
        model={"hidden": [64, 64], "init_std": 0.3, "lr": 1e-3},
        batch={"fragments_per_update": 32, "update_epochs": 4, "mini_batch_size": 128},
        marks=_marks(24_000, 6),
        episodes=100,
    ),
    "pushcube_ppo": LearningTask(
        about="PPO on ManiSkill PushCube, from imitation",
        env=lambda: ManiSkillEnvs(
            task="PushCube-v1", control_mode="pd_ee_delta_pos", reward="sparse", num_envs=4, chunk_size=2
        ),
        objective=lambda correction: PPO(critic_warmup_updates=3, correction=correction),
        model={"hidden": [128, 128], "init_std": 0.3},
        batch={"decisions_per_env": 64, "update_epochs": 8, "micro_batch_size": 64},
        marks=_marks(20_000, 4),
        episodes=100,
        streaming={"envs_per_worker": 2},
        recipe=PUSHCUBE,
    ),
    "smoke": LearningTask(
        about="a few updates of the toy task, to see whether everything runs",
        env=lambda: ToyEnvs(num_envs=2, batched=True),
        objective=lambda correction: PPO(correction=correction),
        model={"hidden": [8, 8]},
        batch={"decisions_per_env": 4, "update_epochs": 1},
        marks=_marks(32, 2),
        episodes=2,
    ),
}


def sweep(
    tasks: Sequence[str],
    seeds: Sequence[int],
    etas: Sequence[int],
    corrections: Sequence[Correction],
    pace: Pace = "full_age",
) -> list[Setting]:
    """All runs, one seed after the other, so that every setting has its first seeds first.

    The synchronous loop runs once per seed: on fresh data all corrections are the same.
    """
    settings = []
    for task in tasks:
        for seed in seeds:
            settings.append(Setting(task, 0, "none", seed, pace))
            settings += [Setting(task, eta, correction, seed, pace) for eta in etas for correction in corrections]
    return settings
