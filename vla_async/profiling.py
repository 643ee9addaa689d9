"""``vla-async profile``: a few updates of ``fit`` with their timeline, and where the time goes.

The run has a directory of its own, <root_dir>/<name>_profile/<time>/, with timeline.json and, with --torch true, a trace of
torch.profiler for the trainer and for each replica. It does not validate, and keeps no checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_async.options import OptionParser, at_least, check_json, check_recipe
from vla_async.refusals import ConfigError

_WARM_UP = 3  # updates that do not count: slots fill, caches warm up, and what is compiled is compiled
_COOL_DOWN = 2  # updates after those that count, so that every replica has written torch's profile
_OWN = ("max_steps", "max_env_steps", "val_every_n_steps", "timeline")  # settings of the trainer


def profile(args: Sequence[str]) -> None:
    """Carry out ``vla-async profile ARGS``.

    Raises:
        ConfigError: if the command line or the recipe is wrong; its message names the key and the choices.
    """
    options, rest = _parse(args)
    first, last = _WARM_UP + 1, _WARM_UP + options.steps
    own = [f"--trainer.max_steps={last + _COOL_DOWN * options.torch}", "--trainer.max_env_steps=null"]
    own += ["--trainer.val_every_n_steps=0", f"--trainer.timeline=[{first},{last}]"]
    from vla_async.monitor.time_use import time_use
    from vla_async.monitor.timeline import FILE, read_timeline

    trainer = _run([*rest, *own], [first, last], options.torch)
    use = time_use(read_timeline(trainer.run.path / FILE), first, last)
    use.table(f"{trainer.name}: {use.steps} updates of {use.seconds / use.steps:.3f} s").print()
    print(use.bottleneck)
    traces = sorted((trainer.run.path / "torch").glob("*.json"))
    print("\n".join([f"timeline: {trainer.run.path / FILE}", *(f"torch trace: {trace}" for trace in traces)]))
    if options.json is not None:
        options.json.write_text(json.dumps(use.to_dict() | {"run": str(trainer.run.path)}, indent=1))


def _parse(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    usage = "vla-async profile --config FILE [--steps N] [--torch true] [--json FILE] [--SECTION.KEY VALUE ...]"
    parser = OptionParser(usage, __doc__)
    parser.add_argument("--steps", type=at_least(1), default=10, help=f"updates that count; {_WARM_UP} are made before them")
    parser.add_argument("--torch", type=_switch, default=False, help="true: write traces of torch.profiler, too")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options, rest = parser.parse_known_args(args)
    check_recipe("profile", rest)
    names = {arg.partition("=")[0] for arg in rest}
    for name in _OWN:
        if f"--trainer.{name}" in names:
            raise ConfigError(f"--trainer.{name} is what profile sets itself (--steps says how many count); leave it out")
    if "--ckpt_path" in names:
        raise ConfigError(
            "--ckpt_path resumes a run, but profile begins a new one; start it from weights: --trainer.init_from"
        )
    check_json(options.json)
    return options, rest


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} must be true or false")
    return text == "true"


def _run(args: Sequence[str], steps: list[int], torch_traces: bool) -> Any:
    """Carry out ``vla-async fit ARGS``, without what a run is kept for; returns its trainer."""
    from vla_async.callbacks import Checkpoint
    from vla_async.cli import VLACLI
    from vla_async.monitor.timeline_run import Timeline
    from vla_async.state import find_checkpoint

    class ProfileCLI(VLACLI):
        def after_instantiate_classes(self) -> None:
            trainer = self.trainer  # `last` and `best` are those of the recipe's name
            found = find_checkpoint(trainer.init_from, trainer.root_dir, trainer.name, prefer="sft")
            trainer.init_from = None if found is None else str(found[1])
            trainer.name = f"{trainer.name}_profile"
            trainer.timeline = Timeline(steps, torch_traces)
            trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]
            super().after_instantiate_classes()

    return ProfileCLI(["fit", *args]).trainer
