"""The subcommands of ``vla-async``: those that :class:`~vla_async.cli.VLACLI` carries out, and functions of their own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

SUBCOMMANDS = {  # those of VLACLI, each a method of the trainer
    "collect": "let a scripted controller collect demonstrations",
    "sft": "fine-tune a policy on demonstrations",
    "fit": "improve a policy by reinforcement learning",
    "validate": "evaluate a policy on the validation seeds",
    "test": "evaluate a policy on the test seeds",
}


class Command(NamedTuple):
    """A subcommand that is a function.

    Attributes:
        function: ``module:name``; it takes the command line after the subcommand, and may return an exit code.
        about: one line for the help.
    """

    function: str
    about: str

    def __call__(self, args: Sequence[str]) -> int:
        """Carry it out; returns the exit code."""
        module, _, name = self.function.partition(":")
        result = getattr(importlib.import_module(module), name)(args)
        return result if isinstance(result, int) else 0


FUNCTIONS = {
    "ablate": Command("vla_async.ablation:ablate", "run fit with one level of asynchrony after the other, and compare them"),
    "doctor": Command("vla_async.doctor.command:doctor", "look whether this machine can run a recipe, and what to mend"),
    "report": Command("vla_async.report.command:report", "make a page of what runs did, or compare them"),
    "profile": Command("vla_async.profiling:profile", "run a few updates of fit, and show where their time goes"),
    "export": Command("vla_async.export:export", "write a policy in the layout of its public release"),
    "replay": Command("vla_async.replay:replay", "play a saved episode again, and compare"),
}
COMMANDS = (*SUBCOMMANDS, *FUNCTIONS)


def listed() -> str:
    """A line per subcommand, for the help."""
    about = SUBCOMMANDS | {name: command.about for name, command in FUNCTIONS.items()}
    return "\n".join(f"  {name:<10} {text}" for name, text in about.items())
