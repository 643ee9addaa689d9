"""``vla-async report``: what runs did, as a page to look at."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vla_async.options import OptionParser
from vla_async.refusals import ConfigError
from vla_async.report.formats import size_text
from vla_async.report.run_data import find_run, read_run

FILE = "report.html"


def report(args: Sequence[str]) -> None:
    """Write the report that the command line asks for, and say where it is.

    Args:
        args: what follows ``report``.

    Raises:
        ConfigError: if there is no such run, or the file has no place.
    """
    options = _parse(args)
    from vla_async.report.page import MAX_RUNS, write_report

    paths = list(dict.fromkeys(find_run(run) for run in options.runs))
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"these are {len(paths)} runs; give at most {MAX_RUNS}, so that their colours can be told apart")
    output: Path = paths[0] / FILE if options.output is None else options.output
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory; give a file in it, for example {output / FILE}")
    if not output.resolve().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.resolve().parent}; make it first")
    runs = []
    for path in paths:
        print(f"  {path}", flush=True)
        runs.append(read_run(path))
    write_report(runs, output, options.max_video_mb * 1e6)
    print(f"report: {output} ({size_text(output.stat().st_size)}); open it in a browser")


def _parse(args: Sequence[str]) -> argparse.Namespace:
    usage = "vla-async report RUN [RUN ...] [--output FILE] [--max-video-mb MB]"
    parser = OptionParser(usage, __doc__)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's directory, or the name of one in runs/ for its newest run; several are drawn into the same charts",
    )
    parser.add_argument("--output", type=Path, help=f"the file; by default {FILE} in the first run's directory")
    parser.add_argument(
        "--max-video-mb", type=_size, default=20.0, help="how many MB of videos are put into the file (default: %(default)g)"
    )
    return parser.parse_args(args)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of MB, 0 or more")
    return size
