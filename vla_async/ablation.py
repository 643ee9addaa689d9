"""``vla-async ablate``: the same recipe five times, with one more level of asynchrony each time.

The rows are those of RL-VLA³'s ablation (Guo et al., arXiv 2603.11101, table 3). Each is a line of overrides for
``vla-async fit``, runs in a process of its own, and differs from the row above in one switch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_async.interrupts import Interrupts
from vla_async.monitor.figures import Figures, ablation_table, read_figures, to_json
from vla_async.options import OptionParser, at_least, check_json, check_recipe
from vla_async.refusals import ConfigError

SWITCHES = ("placement", "train_async", "async_interaction", "streamer")
LOOP = "--trainer.fit_loop."
FIGURES = "figures.json"  # in the run directory, after every run anew
_END_S = 60.0  # for a run to end after Ctrl-C


@dataclass(frozen=True)
class Row:
    """One line of the table: what ``fit`` is run with, beside the recipe."""

    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The name as one of a directory."""
        return "-".join("".join(letter if letter.isalnum() else " " for letter in self.name).split())


def ablation_rows(placement: Mapping[str, Any]) -> list[Row]:
    """The five rows.

    Args:
        placement: the ``Placement`` of the rows whose roles are split.
    """
    together = {"placement": '{"mode": "colocated"}', "train_async": "false", "async_interaction": "false"}
    together["streamer"] = "false"
    rows = [("co-located", together)]
    for name, switch, value in (
        (str(placement["mode"]), "placement", json.dumps(placement)),
        ("+ train_async", "train_async", "true"),
        ("+ async_interaction", "async_interaction", "true"),
        ("+ streamer", "streamer", "true"),
    ):
        rows.append((name, {**rows[-1][1], switch: value}))
    return [Row(name, tuple(f"{LOOP}{switch}={values[switch]}" for switch in SWITCHES)) for name, values in rows]


def ablate(args: Sequence[str]) -> dict[str, list[Figures]]:
    """Run the rows as the command line says, print the table, and save the figures if asked.

    Args:
        args: what follows ``ablate``.

    Raises:
        ConfigError: if the command line or the recipe is wrong; its message names the key and the choices.
        RuntimeError: if a row fails, with what it said.
    """
    options, rest = _parse(args)
    check_json(options.json)
    for arg in rest:
        if arg.partition("=")[0].removeprefix(LOOP).removeprefix("init_args.") in SWITCHES[1:]:
            raise ConfigError(f"{arg.partition('=')[0]} is what ablate turns on and off itself; leave it out")
    config = resolve(rest)
    placement = prepare(config["trainer"])
    config["trainer"] |= {"max_steps": options.steps, "max_env_steps": None}
    if config["trainer"]["val_every_n_steps"]:  # before the first step and after the last, where nothing else runs
        config["trainer"]["val_every_n_steps"] = options.steps
    from vla_async.run_directory import RunDirectory

    trainer = config["trainer"]
    directory = RunDirectory.create(Path(trainer["root_dir"]), f"{trainer['name']}_ablation").path
    try:
        results = measure(ablation_rows(placement), config, directory, options.repeats, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {directory / FIGURES}", flush=True)
        raise
    ablation_table(results, f"{trainer['name']}, {options.steps} updates per run").print()
    print(f"run directory: {directory}")
    if options.json is not None:
        options.json.write_text((directory / FIGURES).read_text())
    return results


def _parse(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    usage = "vla-async ablate --config FILE [--steps N] [--repeats R] [--json FILE] [--SECTION.KEY VALUE ...]"
    parser = OptionParser(usage, __doc__)
    parser.add_argument("--steps", type=at_least(4), default=20, help="updates per run; the first quarter does not count")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="runs per row; the table shows their median")
    parser.add_argument("--json", type=Path, help="file for the figures of all runs")
    options, rest = parser.parse_known_args(args)
    check_recipe("ablate", rest)
    return options, rest


def resolve(args: Sequence[str]) -> dict[str, Any]:
    """The complete configuration of ``vla-async fit ARGS``, as plain values.

    Raises:
        ConfigError: if it is wrong.
    """
    import yaml

    from vla_async.cli import VLACLI
    from vla_async.state import find_checkpoint

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        VLACLI(["fit", *args, "--print_config"])
    config: dict[str, Any] = yaml.safe_load(printed.getvalue())
    if config.get("ckpt_path") is not None:
        raise ConfigError(
            "--ckpt_path resumes a run, but ablate begins new ones; start them from weights: --trainer.init_from"
        )
    trainer = config["trainer"]  # the runs have names of their own, so `last` and `best` would not be found
    found = find_checkpoint(trainer["init_from"], Path(trainer["root_dir"]), trainer["name"], prefer="sft")
    trainer["init_from"] = None if found is None else str(found[1].resolve())
    return config


def prepare(trainer: dict[str, Any]) -> dict[str, Any]:
    """Give a trainer's configuration a ``StreamingFitLoop``, and return the placement of the rows that split the roles.

    Raises:
        ConfigError: if its loop, or its devices, allow no ablation.
    """
    from vla_async.fabric import resolve_accelerator
    from vla_async.loops import StreamingFitLoop, SyncFitLoop

    module, _, name = trainer["fit_loop"]["class_path"].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if kind is SyncFitLoop:  # all of its settings are also the other's
        trainer["fit_loop"]["class_path"] = f"vla_async.loops.{StreamingFitLoop.__name__}"
    elif not issubclass(kind, StreamingFitLoop):
        raise ConfigError(f"trainer.fit_loop={name} has no levels of asynchrony; ablate needs a StreamingFitLoop")
    settings = trainer["fit_loop"].get("init_args", {})
    if settings.get("max_staleness", 1) == 0:
        raise ConfigError("trainer.fit_loop.max_staleness=0 lets no rollout run beside training; set it to 1 or more")
    given: dict[str, Any] | None = settings.pop("placement", None)
    if given is not None and given["mode"] != "colocated":
        return given
    if resolve_accelerator(trainer["accelerator"]) == "cpu":
        return {"mode": "disaggregated", "rollout_devices": (given or {}).get("rollout_devices") or ["cpu"]}
    raise ConfigError(
        "trainer.fit_loop.placement names no devices for the rows whose roles are split; set it in a StreamingFitLoop, for "
        "example --trainer.fit_loop=StreamingFitLoop "
        "'--trainer.fit_loop.placement={mode: disaggregated, rollout_devices: [cuda:1]}'"
    )


def measure(
    rows: Sequence[Row], config: Mapping[str, Any], directory: Path, repeats: int, say: Callable[[str], None]
) -> dict[str, list[Figures]]:
    """Run every row so many times, going round the rows so that none has the quieter hour.

    Args:
        rows: what to run.
        config: the recipe, with its ``trainer.max_steps``.
        directory: where the recipe, the runs, what they say and all figures are written.
        repeats: how often.
        say: is told how far it is.

    Raises:
        RuntimeError: if a run fails, with what it said.
    """
    import yaml

    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    results: dict[str, list[Figures]] = {row.name: [] for row in rows}
    with Interrupts() as interrupts:
        for repeat, row in itertools.product(range(1, repeats + 1), rows):
            name = f"{row.slug}-{repeat}"
            command = ["fit", "--config", str(recipe), *row.overrides, f"--trainer.root_dir={directory}"]
            _run([*command, f"--trainer.name={name}"], directory / f"{name}.log", row.name, interrupts)
            (metrics,) = (directory / name).glob("*/metrics.csv")
            results[row.name].append(read_figures(metrics, skip=max(1, config["trainer"]["max_steps"] // 4)))
            (directory / FIGURES).write_text(json.dumps(to_json(results), indent=1))
            say(f"  {row.name} {repeat}/{repeats}: {results[row.name][-1].env_steps_per_s:,.1f} env steps/s")
    return results


def _run(args: Sequence[str], log: Path, name: str, interrupts: Interrupts) -> None:
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "vla_async", *args], stdout=out, stderr=subprocess.STDOUT)
        try:
            process.wait()
        except BaseException:
            with interrupts.shielded():  # Ctrl-C may have reached it too, and counts once
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()
                process.wait()
            raise
    if process.returncode:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        problem = said[-1].removeprefix("vla-async: ") if said else f"exit code {process.returncode}"
        raise RuntimeError(f"row {name!r} failed: {problem}\n  all that it said: {log}")
