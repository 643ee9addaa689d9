"""``OptionParser``: the options of a subcommand that is a function, beside the settings of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vla_async.refusals import ConfigError


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are for the command line to tell; options have their full names.

    Args:
        usage: it begins with ``vla-async`` and the subcommand.
        about: what the subcommand does, with its line breaks.
    """

    def __init__(self, usage: str, about: str | None) -> None:
        layout = argparse.RawTextHelpFormatter
        name = " ".join(usage.split()[:2])
        super().__init__(prog=name, usage=usage, description=about, allow_abbrev=False, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def at_least(least: int) -> Callable[[str], int]:
    """What reads a whole number, and refuses a smaller one."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least {least}")
        return int(text)

    return parse


def check_recipe(name: str, rest: Sequence[str]) -> None:
    """Refuse a subcommand whose settings name no recipe.

    Raises:
        ConfigError: with an example.
    """
    if not any(arg.partition("=")[0] in ("-c", "--config") for arg in rest):
        raise ConfigError(f"{name} needs a recipe, for example: vla-async {name} --config recipes/toy_ppo.yaml")


def check_json(path: Path | None) -> None:
    """Refuse a file for ``--json`` that cannot be written once all is done.

    Raises:
        ConfigError: names the directory that is missing.
    """
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.resolve().parent}; make it first")
