r"""Whether asynchronous training learns as much from each env step as synchronous training, and how much from each second.

    python -m benchmarks.sample_efficiency --tasks toy_ppo toy_grpo pushcube_ppo --seeds 0 1 2 3 4 \
        --etas 1 2 4 8 --corrections none decoupled --json results.json --figure-dir docs/images

For every task the synchronous loop is compared with the asynchronous one at bounds η on the staleness, with and without a
correction for the age of the data, on the same seeds. All data of an asynchronous run is as old as its bound allows (see
``full_age.py``). Success is that of held-out episodes, from copies of the policy at fixed env steps.

Each run is a process of its own, and is added to the JSON file when it has ended; what is there already is not run again.
``--wall-clock`` instead runs the same settings by turns, one at a time, on whatever data comes, as users have it, and
compares seconds; run that on a machine that does nothing else. ``--report-only`` makes tables and figures of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.learning_cases import TASKS, Setting, sweep
from benchmarks.learning_report import curves, draw, learning_table, verdicts, wall_clock_table

CORRECTIONS = ("none", "truncated_is", "decoupled")


class Results:
    """The records in a JSON file.

    Args:
        path: the file; written anew after each record, whole or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        self.records.append(record)
        unfinished = self.path.with_name(f".unfinished-{self.path.name}")
        unfinished.write_text(json.dumps(self.records, indent=1))
        os.replace(unfinished, self.path)

    def __contains__(self, setting: Setting) -> bool:
        """Whether the setting was run."""
        wanted = dataclasses.asdict(setting)
        return any(all(record[name] == value for name, value in wanted.items()) for record in self.records)


def imitate(recipe: Path, directory: Path) -> Path:
    """The weights that all runs of a recipe's task start from: collected and imitated once, then kept in ``directory``."""
    place = directory.resolve() / recipe.stem
    if not list(place.glob("imitation/*/checkpoints/last.ckpt")):
        common = ["--config", str(recipe), f"--trainer.root_dir={place}", "--trainer.name=imitation"]
        for command, loop in (("collect", "collect_loop"), ("sft", "sft_loop")):
            _vla_async(command, *common, f"--trainer.{loop}.directory={place / 'demonstrations'}")
    return next(place.glob("imitation/*/checkpoints/last.ckpt"))


def _vla_async(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "vla_async", *arguments], check=True, stdout=subprocess.DEVNULL)


def run_all(settings: Sequence[Setting], results: Results, directory: Path, jobs: int) -> list[str]:
    """Run what was not run yet, so many at a time; returns what went wrong."""
    left = [setting for setting in settings if setting not in results]
    recipes = {setting.task: TASKS[setting.task].recipe for setting in left}
    start = {name: imitate(recipe, directory) for name, recipe in recipes.items() if recipe is not None}
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_run, setting, start.get(setting.task)): setting for setting in left}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                setting = futures[future]
                if error := future.exception():
                    failures.append(f"{setting}: {error}")
                else:
                    results.add(future.result())
                last = failures[-1] if error else _brief(results.records[-1])
                print(f"{number}/{len(left)} {setting.task} {setting.name} seed {setting.seed}: {last}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _run(setting: Setting, start: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        record, said = Path(place) / "record.json", Path(place) / "said"
        arguments = [json.dumps(dataclasses.asdict(setting)), str(record), place, *([str(start)] if start else [])]
        with said.open("w") as out:
            command = [sys.executable, "-m", "benchmarks.learning_run", *arguments]
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}:\n{said.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(record.read_text())
        return found


def _brief(record: dict[str, Any]) -> str:
    rates = " ".join(f"{point['successes'] / point['episodes']:.2f}" for point in record["points"])
    return f"success {rates} · staleness {record['staleness_mean']:.2f} · {record['points'][-1]['wall_s']:.0f} s"


def show(name: str, records: Sequence[dict[str, Any]], figures: Path | None, *, markdown: bool) -> None:
    """Print the tables of a task, and draw its figures if a directory is given."""
    about, own = TASKS[name].about, [record for record in records if record["task"] == name]
    learned, timed = curves(own), curves(own, "free")
    tables = [learning_table(about, learned)] if learned else []
    tables += [wall_clock_table(about, timed)] if timed else []
    for table in tables:
        if markdown:
            print(f"\n{table.title}\n\n{table.markdown()}")
        else:
            table.print()
    for line in verdicts(learned) if learned else []:
        print(f"  {line}")
    if figures is not None:
        for found, file, by in ((learned, f"learning_{name}", "env steps"), (timed, f"wall_clock_{name}", "seconds")):
            if found:
                print(f"figure: {draw(about, found, figures / f'{file}.png', by)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the tables and draw the figures."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.sample_efficiency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[name for name in TASKS if name != "smoke"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--etas", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["none", "decoupled"])
    parser.add_argument("--json", type=Path, default=Path("sample_efficiency.json"), help="file of the records")
    parser.add_argument("--figure-dir", type=Path, help="directory for a figure per task")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/sample_efficiency"), help="for weights to start from")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--wall-clock", action="store_true", help="compare seconds: one run at a time, on an idle machine")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    results = Results(args.json)
    settings = sweep(args.tasks, args.seeds, args.etas, args.corrections, "free" if args.wall_clock else "full_age")
    failures = [] if args.report_only else run_all(settings, results, args.work_dir, 1 if args.wall_clock else args.jobs)
    for name in args.tasks:
        show(name, results.records, args.figure_dir, markdown=args.markdown)
    if failures:
        raise SystemExit("\n".join(["some runs failed:", *failures]))


if __name__ == "__main__":
    main()
