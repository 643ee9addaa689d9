"""What the overlap of rollouts and training is measured on: emulated costs, as recipes for ``vla-async fit``.

All costs are about a fifth to a tenth of those of the models and simulators that they stand for, in the same proportions,
so that a run takes seconds. Devices and envs sleep, so a few cores are enough for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vla_async.ablation import LOOP, Row, ablation_rows

SPLIT = {"mode": "disaggregated", "rollout_devices": ["cpu"]}
CHUNK = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Envs, a policy and a training, by what they cost.

    Attributes:
        about: what it stands for.
        envs: number of envs, or rows of the batch.
        decisions: per env and update.
        step_s: mean seconds of an env step; of a step of the whole batch, whatever its size, if ``batched``.
        sigma: of the step time's logarithm; 0 for steps that always take the same time.
        reset_s: seconds of a reset.
        horizon: env steps of an episode.
        batched: whether all envs are rows of one simulator.
        act_flat_s: seconds per forward pass.
        act_per_row_s: seconds per row, on one device.
        train_per_decision_s: seconds per decision, on one device.
        micro_batch: decisions per micro-batch.
        rollout_devices: devices that act, where the roles are split.
        train_devices: devices that train, where the roles are split.
    """

    about: str
    envs: int
    decisions: int
    step_s: float
    sigma: float = 0.0
    reset_s: float = 0.0
    horizon: int = 1000
    batched: bool = False
    act_flat_s: float
    act_per_row_s: float = 0.0
    train_per_decision_s: float
    micro_batch: int
    rollout_devices: int = 1
    train_devices: int = 1

    def config(self, loop: str, max_steps: int, **settings: Any) -> dict[str, Any]:
        """The recipe, with a fit loop of that name."""
        duration = {"class_path": "vla_async.emulation.Constant", "init_args": {"seconds": self.step_s}}
        if self.sigma:
            drawn = {"mean_s": self.step_s, "sigma": self.sigma}
            duration = {"class_path": "vla_async.emulation.LogNormal", "init_args": drawn}
        settings |= {"decisions_per_env": self.decisions, "update_epochs": 1, "micro_batch_size": self.micro_batch}
        envs = {"num_envs": self.envs, "chunk_size": CHUNK, "step_time": duration, "batched": self.batched}
        model = {name: getattr(self, name) for name in ("act_flat_s", "act_per_row_s", "train_per_decision_s")}
        model |= {name: getattr(self, name) for name in ("rollout_devices", "train_devices")}
        return {
            "trainer": {
                "fit_loop": {"class_path": f"vla_async.loops.{loop}", "init_args": settings},
                "max_steps": max_steps,
                "accelerator": "cpu",
                "num_threads": 1,
            },
            "model": {
                "class_path": "vla_async.emulation.EmulatedVLAPolicy",
                "init_args": {"objective": {"class_path": "vla_async.objectives.PPO"}, **model},
            },
            "env": {
                "class_path": "vla_async.emulation.EmulatedEnvs",
                "init_args": {**envs, "reset_s": self.reset_s, "max_episode_steps": self.horizon},
            },
        }

    @property
    def micro_batch_s(self) -> float:
        """Seconds of training on a full micro-batch, on devices that do nothing else."""
        return self.micro_batch * self.train_per_decision_s / self.train_devices


def ratio_case(rollout_s: float, train_s: float) -> Case:
    """Eight envs whose lockstep rollout takes so long, and a training that takes so long. No jitter, a device each."""
    envs, decisions = 8, 8
    forward = rollout_s / 60
    step = (rollout_s - (decisions + 1) * forward) / (decisions * CHUNK)  # one more forward values the ends
    return Case(
        about=f"rollout {rollout_s:g} s, training {train_s:g} s",
        envs=envs,
        decisions=decisions,
        step_s=step,
        act_flat_s=forward,
        train_per_decision_s=train_s / (envs * decisions),
        micro_batch=decisions,
    )


RATIOS = {"1:1": (1.0, 1.0), "7:3": (1.4, 0.6), "2:8": (0.4, 1.6)}

STREAMING = replace(ratio_case(2.4, 0.8), about="envs that drift apart, three times as long as their training", sigma=0.8)

LIBERO = Case(
    about="like LIBERO + π0.5: a process per env, jittery steps, resets of 28 steps; 4 devices, split 1 + 3",
    envs=12,
    decisions=10,
    step_s=0.01,
    sigma=0.8,
    reset_s=0.28,
    horizon=200,
    act_flat_s=0.01,
    act_per_row_s=0.001,
    train_per_decision_s=0.0133,
    micro_batch=20,
    rollout_devices=1,
    train_devices=3,
)

MANISKILL = Case(
    about="like ManiSkill + π0: one batch, whose step takes as long for half of the rows; 4 devices, split 2 + 2",
    envs=32,
    decisions=8,
    step_s=0.02,
    batched=True,
    act_flat_s=0.01,
    act_per_row_s=0.001,
    train_per_decision_s=0.0055,
    micro_batch=32,
    rollout_devices=2,
    train_devices=2,
)

MANISKILL_HEAVY = replace(
    MANISKILL,
    about="the same with four times the training; 4 devices, split 1 + 3",
    train_per_decision_s=0.022,
    rollout_devices=1,
    train_devices=3,
)


def rows(case: Case) -> list[Row]:
    """The five rows, on equally many devices: co-located, all of them act and train by turns.

    A batched simulator that interacts asynchronously is cut into two stages.
    """
    found = []
    for row in ablation_rows(SPLIT):
        overrides, stages = row.overrides, 1
        if row.name == "co-located":
            overrides = (*overrides, "--model.colocated=true")
        if case.batched and f"{LOOP}async_interaction=true" in overrides:
            overrides, stages = (*overrides, f"{LOOP}num_stages=2"), 2
        found.append(Row(row.name if stages == 1 else f"{row.name}, 2 stages", overrides))
    return found


def recommended() -> Row:
    """What docs/async_training.md says for a batched simulator: all levels, but the simulator whole."""
    return Row("recommended: all, 1 stage", ablation_rows(SPLIT)[-1].overrides)
