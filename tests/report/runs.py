"""Run directories as a run would have left them, written by hand."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = "vla-async fit --config recipes/toy_ppo.yaml --trainer.max_steps 60"


def write_run(
    path: Path,
    lines: Sequence[Mapping[str, object]],
    config: str = "",
    environment: Mapping[str, Any] | None = None,
    timeline: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Make a run directory.

    Args:
        path: the directory.
        lines: of metrics.csv; a metric that a line lacks is an empty cell.
        config: text of config.yaml.
        environment: content of environment.json.
        timeline: events of timeline.json.
    """
    path.mkdir(parents=True)
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for line in lines for name in line}))
        writer.writeheader()
        writer.writerows(lines)
    if config:
        (path / "config.yaml").write_text(config)
    if environment is not None:
        (path / "environment.json").write_text(json.dumps(environment))
    if timeline is not None:
        (path / "timeline.json").write_text(json.dumps({"traceEvents": timeline}))
    return path


def update(step: int, **metrics: float) -> dict[str, float]:
    """The least that a line of an update has; names in ``metrics`` have ``__`` for ``/``."""
    line = {"step": step, "env_steps": 500 * step, "episodes": 20 * step, "elapsed_s": 1.5 * step, "lr": 1e-3}
    return line | {name.replace("__", "/"): value for name, value in metrics.items()}


def evaluation(step: int, rate: float, tasks: Sequence[str] = (), split: str = "validate") -> dict[str, float]:
    """What an evaluation of 50 episodes per task logs."""
    line = {"step": step, "env_steps": 500 * step, "elapsed_s": 1.5 * step}
    for place, task in enumerate(("", *tasks)):
        end, of_task = f"/{task}" if task else "", max(0.0, rate - 0.05 * place)
        for kind, value in (("once", of_task), ("at_end", 0.8 * of_task)):
            line[f"{split}/success_{kind}{end}"] = value
            line[f"{split}/success_{kind}_low{end}"] = max(0.0, value - 0.1)
            line[f"{split}/success_{kind}_high{end}"] = min(1.0, value + 0.1)
        line[f"{split}/episodes{end}"] = 50
        line[f"{split}/return{end}"] = 10 * of_task
    return line


def streaming_lines(count: int = 60, pace: float = 1.0, tasks: Sequence[str] = ()) -> list[dict[str, float]]:
    """All that a run of ``StreamingFitLoop`` with PPO logs, as it might look."""
    lines = [evaluation(0, 0.1, tasks)]
    for step in range(1, count + 1):
        t = step / count
        wave = math.sin(7.0 * step) * 0.5 + math.sin(2.3 * step) * 0.5  # noise that is the same each time
        line = update(step)
        line |= {
            "elapsed_s": 1.5 * step / pace,
            "time/env_steps_per_s": pace * (330 + 30 * wave),
            "time/update_s": 1.5 / pace,
        }
        line |= {
            "time/decisions_per_s": pace * 80,
            "time/samples_per_s": pace * 320,
            "time/wait_s": 0.2,
            "time/publish_s": 0.004,
        }
        line |= {
            "time/last_arrival_to_step_s": 0.3,
            "worker/idle_share": 0.35 + 0.1 * wave,
            "replica/idle_share": 0.8 + 0.05 * wave,
        }
        line |= {"trainer/idle_share": 0.1 + 0.05 * wave, "worker/no_slot_share": 0.2, "worker/restarts": 0}
        line |= {
            "queue/produced": 8 * step + 6,
            "queue/consumed": 8 * step,
            "queue/in_flight": 5 + wave,
            "queue/cut": step // 9,
        }
        line |= {"queue/dropped/too old": step // 20, "queue/waiting": 2 + wave, "queue/occupied_share": 0.7 + 0.1 * wave}
        line |= {"batch_size/mean": 3.1 + wave, "batch_size/limit": 8, "batch_size/share_1": 0.2, "batch_size/share_2": 0.2}
        line |= {"batch_size/share_4": 0.4 + 0.2 * wave, "batch_size/share_8": 0.2 - 0.2 * wave}
        line |= {"request_wait_s/p50": 0.002, "request_wait_s/p95": 0.006 + 0.001 * wave, "request_wait_s/p99": 0.012}
        line |= {"forward_s/p50": 0.004, "forward_s/p95": 0.005 + 0.0005 * wave}
        line |= {
            "staleness/min": 0,
            "staleness/mean": 0.6 + 0.2 * wave,
            "staleness/max": 1 + (step % 4 == 0),
            "staleness/bound": 2,
        }
        line |= {"staleness/share_0": 0.5 - 0.2 * wave, "staleness/share_1": 0.4 + 0.2 * wave}
        line |= {"staleness/share_2": 0.1} if step % 4 == 0 else {}
        line |= {
            "ppo/approx_kl": 0.01 + 0.004 * wave,
            "ppo/clip_fraction": 0.12 + 0.03 * wave,
            "ppo/entropy": 1.2 - t + 0.1 * wave,
        }
        line |= {"ppo/explained_variance": 0.9 * t + 0.05 * wave, "ppo/log_prob_gap": 0.02 * t, "ppo/ratio": 1 + 0.01 * wave}
        line |= {
            "ppo/policy_loss": -0.01 * wave,
            "ppo/value_loss": 0.5 - 0.4 * t,
            "ppo/capped_fraction": 0.01,
            "train/grad_norm": 0.6 + 0.2 * wave,
        }
        line |= {
            "rollout/success_once": min(1.0, max(0.0, 0.1 + 0.8 * t + 0.15 * wave)),
            "rollout/return": 8 * t + wave,
            "rollout/episodes": 20,
        }
        line |= {"rollout/success_at_end": max(0.0, 0.7 * t), "rollout/episode_env_steps": 30 - 12 * t}
        line |= {
            "memory/trainer_mib": 900 + step,
            "memory/workers_mib": 1500,
            "memory/replicas_mib": 400,
            "memory/slab_mib": 120,
        }
        if step % 15 == 0:
            line |= evaluation(step, min(1.0, 0.1 + 0.85 * t), tasks) | {"elapsed_s": line["elapsed_s"]}
        lines.append(line)
    return lines


def step_events(durations: Sequence[float], workers: int = 2) -> list[dict[str, Any]]:
    """A timeline of updates of these durations (seconds): env steps, forward passes, and what the trainer does."""
    lanes = ["trainer rank 0", "replica 0", *(f"env worker {index}" for index in range(workers))]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": lane}}
        for place, lane in enumerate(lanes)
    ]

    def add(tid: int, name: str, start: float, seconds: float, **args: object) -> None:
        events.append({"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": 1e6 * start, "dur": 1e6 * seconds, "args": args})

    start = 0.5
    for number, seconds in enumerate(durations, 1):
        add(0, f"step {number}", start, seconds, step=number)
        add(0, "wait for trajectories", start, 0.2 * seconds)
        add(0, "forward and backward", start + 0.2 * seconds, 0.5 * seconds, decisions=64)
        add(0, "optimizer step", start + 0.7 * seconds, 0.2 * seconds)
        for place in range(20):
            at = start + seconds * place / 20
            add(1, "forward", at, 0.02 * seconds, rows=2, version=number)
            for worker in range(workers):
                add(2 + worker, "env steps", at + 0.02 * seconds, 0.025 * seconds, rows=1)
        start += seconds
    return events
