"""``OptionParser``: the options of a subcommand that is a function, beside the settings of a recipe."""

from __future__ import annotations

import argparse
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
