"""The console script ``vla-async``, also as ``python -m vla_async``."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from vla_async import __version__
from vla_async.commands import FUNCTIONS, listed
from vla_async.refusals import ConfigError, check_command_line

# what a disk or its owner refuses: for the user to mend, whichever library was writing
_REFUSED_BY_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

HELP = f"""usage: vla-async SUBCOMMAND --config FILE [--config FILE ...] [--SECTION.KEY VALUE ...]

subcommands:
{listed()}

examples:
  vla-async fit --config recipes/toy_ppo.yaml
  vla-async fit --config recipes/toy_ppo.yaml --trainer.max_steps 10 --env.num_envs 8
  vla-async fit --config recipes/toy_ppo.yaml --ckpt_path last       resume the newest run of this name
  vla-async test --config recipes/toy_ppo.yaml --ckpt_path best
  vla-async ablate --config recipes/toy_ppo.yaml --steps 20 --repeats 3
  vla-async profile --config recipes/toy_ppo.yaml                    show where the time of an update goes
  vla-async fit --config recipes/toy_ppo.yaml --print_config         show all settings, with their values

more:
  vla-async fit --help                        all settings
  vla-async ablate --help                     its own options; all others are fit's (also of export)
  vla-async fit --model.help TinyVLAPolicy    the settings of a class
  VLA_ASYNC_DEBUG=1 vla-async ...             errors with their traceback
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        args: what follows the program's name; ``sys.argv`` by default.

    Returns:
        The exit code: 0, or 1 after an error, or 130 after Ctrl-C.
    """
    is_process = args is None
    args = sys.argv[1:] if args is None else list(args)
    if args and args[0] in ("-h", "--help", "--version"):
        print(__version__ if args[0] == "--version" else HELP, end="\n" if args[0] == "--version" else "")
        return 0
    if is_process:
        sys.path.append(os.getcwd())  # a class_path may name a module of the user's own, as with `python -m`
        warnings.formatwarning = _plain_warning
    try:
        check_command_line(args)
        if args[0] in FUNCTIONS:
            return FUNCTIONS[args[0]](args[1:])
        gc.disable()  # importing makes objects and no garbage, and looking for it takes a third of the time
        from vla_async.cli import VLACLI

        gc.freeze()
        gc.enable()
        VLACLI(args)
    except KeyboardInterrupt:
        return _leave(130) if is_process else 130
    except (ValueError, RuntimeError, ArithmeticError, OSError, ImportError, MemoryError) as error:
        message = _disk_message(error) or (str(error) if is_ours(error) else None)
        if os.environ.get("VLA_ASYNC_DEBUG") or message is None:
            raise
        print(f"vla-async: {message}", file=sys.stderr)
        return _leave(1) if is_process and isinstance(error, ConfigError) else 1
    return 0


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a user of the command line wants to know of a warning: what it says."""
    return f"warning: {message}\n"


def _leave(code: int) -> NoReturn:
    """End the process now. Taking all that was imported apart again takes a second, which somebody would wait for."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _disk_message(error: BaseException) -> str | None:
    """The path and the reason, if a disk is full or a file may not be touched; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED_BY_THE_DISK:
        return None
    return f"{error.filename or 'a file could not be written'}: {error.strerror}"


def is_ours(error: BaseException) -> bool:
    """Whether this library raised the error itself, with a message for the user, and it is no accident inside another."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return str(innermost.f_globals.get("__name__")).partition(".")[0] == "vla_async"


if __name__ == "__main__":
    sys.exit(main())
