"""The main job: a Vision-Language-Action policy gets better by reinforcement learning in a real simulator.

Collects scripted demonstrations, trains a mediocre policy on a few of them, freezes its success on held-out episodes,
improves it by reinforcement learning, and evaluates it on the same episodes again:

    python examples/demo.py                  # one training seed, as `make demo` does
    python examples/demo.py --seeds 0 1 2    # three
    python examples/demo.py --compare        # train a second time with the synchronous loop, and compare the wall clocks
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from vla_async import AsyncTrainer
from vla_async.cli import VLACLI
from vla_async.loops import EvaluationResult
from vla_async.monitor.report import ResultRow, plot_success, results_table
from vla_async.report.page import write_report
from vla_async.report.run_data import read_run

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "maniskill_pushcube_sft_ppo.yaml"
SYNCHRONOUS = "--trainer.fit_loop=SyncFitLoop"


def run(subcommand: str, recipe: Path, *overrides: str) -> VLACLI:
    """Run one subcommand of `vla-async` in this process, and say so."""
    arguments = [subcommand, "--config", str(recipe), *overrides]
    print(f"\n$ vla-async {' '.join(arguments)}", flush=True)
    return VLACLI(arguments)


def improve(recipe: Path, seed: int, compare: bool) -> list[ResultRow]:
    """Imitate, evaluate, improve, evaluate again; returns the figures, also of the synchronous loop if asked."""
    seeded = (f"--trainer.seed={seed}",)
    imitated = run("sft", recipe, *seeded).trainer.run.checkpoints / "last.ckpt"
    before = run("test", recipe, *seeded, f"--ckpt_path={imitated}").result
    rows = []
    for kind, override in {"": (), ", synchronous": (SYNCHRONOUS,)}.items() if compare else [("", ())]:
        started = time.monotonic()
        fit = run("fit", recipe, *seeded, f"--trainer.init_from={imitated}", *override).trainer
        wall_s = time.monotonic() - started
        after = run("test", recipe, *seeded, f"--ckpt_path={fit.run.checkpoints / 'best.ckpt'}").result
        name = f"{before.tasks[0]}, seed {seed}{kind}"
        rows.append(ResultRow(name, before.success(), after.success(), fit.state.counters.env_steps, wall_s))
        report(rows[-1], seed, fit, before, after)
    return rows


def report(row: ResultRow, seed: int, fit: AsyncTrainer, before: EvaluationResult, after: EvaluationResult) -> None:
    """Write the figures, the learning curve and a page about the run into the directory of the fit run."""
    record: dict[str, Any] = {
        "seed": seed,
        "loop": type(fit.fit_loop).__name__,
        "baseline": vars(row.baseline),
        "after": vars(row.after),
        "after_at_end": vars(after.success("success_at_end")),
        "env_steps": row.env_steps,
        "wall_s": round(row.wall_s, 1),
        "training_s": round(fit.state.counters.elapsed_s, 1),
        "videos": [str(video) for video in [*before.videos, *after.videos]],
    }
    (fit.run.path / "result.json").write_text(json.dumps(record, indent=2) + "\n")
    plot = next(callback for callback in fit.callbacks if hasattr(callback, "points"))
    plot_success(plot.points, fit.run.path / "success.png", f"{before.tasks[0]}: SFT, then PPO", before.success())
    page = write_report([read_run(fit.run.path)], fit.run.path / "report.html")
    files = [("report", page), ("learning curve", fit.run.path / "success.png")]
    for name, file in [*files, *(("video", video) for video in after.videos)]:
        print(f"{name}: {file}")


def main() -> None:
    """Run the whole pipeline for each training seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the recipe of all stages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="training seeds; the test episodes stay the same")
    parser.add_argument("--compare", action="store_true", help="also train with the synchronous loop, for its wall clock")
    options = parser.parse_args()
    started = time.monotonic()
    collected = run("collect", options.recipe, "--trainer.collect_loop.overwrite=true").result
    print(f"{collected.episodes} demonstrations from {collected.attempts} attempts")
    rows = [row for seed in options.seeds for row in improve(options.recipe, seed, options.compare)]
    print()
    results_table(rows, title="success_once on the same held-out episodes").print()
    print(f"everything together took {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    main()
