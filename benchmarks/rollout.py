"""Rollout engines side by side, on the same envs and the same policy.

    python -m benchmarks.rollout --case jitter-16 --repeats 5 --seconds 8

Each measurement runs in a process of its own, and the repeats go round the engines, so that none has the quieter hour.
The emulated device serves one forward at a time, also where an engine copies the policy into many workers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.collectors import NAMES
from benchmarks.measure import MARK, Job
from benchmarks.table import print_table

_DEFAULT = "bare,ours,ours@plain,lockstep@plain,multi-async@plain,abc-threads@plain,abc-shm@plain,abc-slots@plain"
_GRACE_S = 240.0  # for start and stop; TorchRL's take up to a minute each


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases, print a table for each, and save all figures if asked."""
    args = _parse(argv)
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(f"{os.cpu_count()} cores; a sleep of 5 ms takes {1e3 * results['machine']['sleep_5_ms_takes_s']:.2f} ms here")
    for case in args.cases:
        jobs = {name: Job(case, name, args.seconds, max_wait_s=args.max_wait_s) for name in args.collectors}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for repeat in range(args.repeats):
            for name, job in jobs.items():
                runs[name].append(run(job))
                print(f"  {case} {name} {repeat + 1}/{args.repeats}: {_brief(runs[name][-1])}", file=sys.stderr, flush=True)
        ideals = {"streaming": CASES[case].ideal(), "lockstep": CASES[case].ideal(lockstep=True)}
        results["cases"][case] = {"ideal": ideals, "runs": runs}
        print_table(case, CASES[case].about, ideals["streaming"], runs)
        if args.json:  # after each case, so that an interrupt loses one at most
            args.json.write_text(json.dumps(results, indent=1))


def run(job: Job) -> dict[str, Any]:
    """One measurement in a fresh process group; ``{"error": ...}`` if it failed or hung."""
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(dataclasses.asdict(job))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
        try:
            process.wait(job.seconds + _GRACE_S)
            problem = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"still running after {job.seconds + _GRACE_S:g} s"
        finally:
            _end_group(process)
        out.seek(0)
        found = [line for line in out if line.startswith(MARK)]
        if found:  # a process that measured, but cannot end, is the engine's fault and no reason to lose the figures
            measured: dict[str, Any] = json.loads(found[-1].removeprefix(MARK))
            return measured | ({"problem": problem} if process.returncode else {})
        err.seek(0)
        said = [line.strip() for line in err if line.strip()]
        return {"error": f"{problem}: {said[-1] if said else 'no message'}"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what the measurement left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    overshoots = []
    for _ in range(100):
        begin = time.perf_counter()
        time.sleep(0.005)
        overshoots.append(time.perf_counter() - begin)
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "sleep_5_ms_takes_s": statistics.median(overshoots),
    }


def _brief(run: dict[str, Any]) -> str:
    return run["error"] if "error" in run else f"{run['rate']:.0f} env steps/s"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = "\n".join(f"  {name:16} {case.about}" for name, case in CASES.items())
    engines = "\n".join(f"  {name:16} {about}" for name, about in NAMES.items())
    about = (
        f"{__doc__}\ncases:\n{cases}\n\ncollectors (add @plain for envs written by hand as a TorchRL EnvBase):\n{engines}"
    )
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rollout", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True, help="one, several with commas between them, or all")
    parser.add_argument("--collectors", default=_DEFAULT, help=f"default: {_DEFAULT}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a measurement")
    parser.add_argument("--minutes", type=float, help="the same in minutes; memory is then followed through it")
    parser.add_argument("--max-wait-ms", type=float, help="Tmax of our collector, instead of the case's")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args(argv)
    args.cases = list(CASES) if args.case == "all" else args.case.split(",")
    args.collectors = args.collectors.split(",")
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; choose {', '.join(CASES)} or all")
    valid = {name + form for name in NAMES for form in ("", "@plain", "@chunked")}
    if unknown := [name for name in args.collectors if name not in valid]:
        parser.error(f"unknown collector {', '.join(unknown)}; choose {', '.join(NAMES)}, with @plain or alone")
    args.seconds = args.seconds if args.minutes is None else 60.0 * args.minutes
    args.max_wait_s = None if args.max_wait_ms is None else args.max_wait_ms / 1e3
    return args


if __name__ == "__main__":
    main()
