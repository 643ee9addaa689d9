"""Run something in a process of its own, which may crash or hang there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# so that the process finds this package, wherever it is started from
_HERE = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        output: its standard output.
        problem: how it failed, in words; empty if it did not.
        crashed: whether a signal ended it.
    """

    output: str
    problem: str = ""
    crashed: bool = False


def run_apart(args: Sequence[str], timeout_s: float, data: bytes = b"") -> Ended:
    """Run this Python with some arguments.

    Args:
        args: for example ``["-m", "vla_async.doctor.stepping"]``.
        timeout_s: after which it is killed.
        data: for its standard input.
    """
    command = [sys.executable, *args]
    environment = os.environ | {"PYTHONPATH": _HERE}
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=timeout_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Ended("", f"it took longer than {timeout_s:g} s")
    output, said = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return Ended(output, f"it crashed with {name}", crashed=True)
    return Ended(output, "" if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[-1])
