"""``vla-async doctor``: look at the machine, and say for each thing what was found and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vla_async.doctor import graphics, machine, simulators, software
from vla_async.doctor.check import Check, to_json, to_table, verdict
from vla_async.envs.egl_devices import egl_devices
from vla_async.monitor.environment import usable_cores
from vla_async.options import OptionParser
from vla_async.refusals import ConfigError
from vla_async.shared_memory import free_shared_memory

if TYPE_CHECKING:
    from vla_async.doctor.recipe import Needs
    from vla_async.envs import EnvSpec

_FAMILIES = {"ManiSkillEnvs": "maniskill", "LiberoEnvs": "libero"}


def doctor(args: Sequence[str]) -> int:
    """Carry out ``vla-async doctor ARGS``.

    Returns:
        1 if the recipe, or without one any run, cannot start here; else 0.

    Raises:
        ConfigError: if the command line or the recipe says what does not exist.
    """
    options, rest = _parse(args)
    recipe = ", ".join(options.recipe) or None
    command = [part for path in options.recipe for part in ("--config", path)] + rest
    if rest and recipe is None:
        raise ConfigError(
            f"nothing is expected at {rest[0]!r} without a recipe: vla-async doctor --recipe FILE {rest[0]} ..."
        )
    # what builders print is not for whoever reads the JSON
    with contextlib.redirect_stdout(sys.stderr):
        checks = list(_looking(examine(command, options.simulators), quiet=options.json))
    if options.json:
        print(json.dumps(to_json(checks, recipe), indent=2))
    else:
        from rich.console import Console

        Console().print(to_table(checks))
        print(verdict(checks, recipe))
    return int(any(check.blocks for check in checks))


def _parse(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    usage = "vla-async doctor [--recipe FILE [--SECTION.KEY VALUE ...]] [--json] [--skip-simulators]"
    parser = OptionParser(usage, __doc__)
    about = "look only at what fit needs for this recipe (may be given several times, with settings as for fit)"
    parser.add_argument("--recipe", "--config", "-c", action="append", default=[], metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    about = "do not step any simulator, which takes some ten seconds for each"
    parser.add_argument("--skip-simulators", dest="simulators", action="store_false", help=about)
    return parser.parse_known_args(args)


def _looking(checks: Iterator[Check], quiet: bool) -> Iterator[Check]:
    """The same, while a line on a terminal says that something is going on."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    with console.status("looking around ..."):
        yield from checks


def examine(command: Sequence[str], step: bool = True) -> Iterator[Check]:
    """All checks.

    Args:
        command: the arguments of ``fit`` that say the recipe; none to look at everything.
        step: whether to step simulators.
    """
    yield software.python((sys.version_info.major, sys.version_info.minor))
    yield software.packages(software.own_requirements())
    needs: Needs | None = None
    if command:
        from vla_async.doctor.recipe import needs_of

        needs = needs_of(command)
        yield needs.check
    yield software.torch_and_cuda(software.TorchFacts.look(), needs is not None and needs.wants_cuda)
    yield machine.processes()
    spec = None
    for check, seen in _envs(needs, step):
        spec = seen or spec
        yield check
    yield from _machine(needs, spec)
    yield from software.loggers(() if needs is None else needs.loggers)
    if needs is None or needs.records:
        yield software.ffmpeg(needed=needs is not None)


def _envs(needs: Needs | None, step: bool) -> Iterator[tuple[Check, EnvSpec | None]]:
    """What simulators need and, stepped, whether they work: the recipe's, or all that are installed."""
    kinds = [] if needs is None or needs.env is None else [kind.__name__ for kind in type(needs.env).__mro__]
    used = [_FAMILIES[kind] for kind in kinds if kind in _FAMILIES]
    families = simulators.installed_simulators() if needs is None else used
    if needs is None or used:
        yield graphics.system_libraries(families, bool(used)), None
    if "maniskill" in families:
        yield graphics.vulkan("maniskill" in used), None
    if "libero" in families:
        yield graphics.offscreen_gl("libero" in used, egl_devices()), None
    if needs is not None:
        if step and needs.env is not None:
            yield simulators.stepped("envs", needs.env, needed=True)
        return
    for name, factory in simulators.examples().items():
        if name != "toy" and name not in families:
            fix = f"pip install 'vla_async[{name}]', if you use it"
            yield Check(name, "ok", "not installed", fix, needed=False), None
        elif step:
            yield simulators.stepped(name, factory, needed=name == "toy")


def _machine(needs: Needs | None, spec: EnvSpec | None) -> Iterator[Check]:
    """What the machine has, against what the recipe's processes take."""
    yield machine.shared_memory(free_shared_memory(), None if needs is None else needs.slab_bytes(spec))
    yield from machine.limits(machine.Limits.look(), 4 if needs is None else needs.processes)  # the least of an async run
    if needs is not None:
        yield machine.cores(usable_cores(), needs.workers, needs.cpu_replicas, needs.ranks)
    yield machine.disk(Path("runs") if needs is None else needs.root)
