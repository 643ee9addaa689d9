"""What a trainer takes, held to what makes sense before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch

from vla_async.envs.base import EnvFactory
from vla_async.policies.base import VLAPolicy

if TYPE_CHECKING:
    from vla_async.loops.base import Loop

_LIMITS = {
    "max_steps": (-1, None, ", where -1 is no limit"),
    "max_env_steps": (1, None, ", or null for no limit"),
    "val_every_n_steps": (0, None, ", where 0 is never"),
    "num_threads": (1, None, ", or null for the cores that the envs leave free"),
    "seed": (0, 2**32 - 1, ""),
}


def check_limits(**numbers: int | None) -> None:
    """Refuse a trainer's setting that is out of its range; None is always in it.

    Raises:
        ValueError: names the setting, its value and the range.
    """
    for name, value in numbers.items():
        least, most, meaning = _LIMITS[name]
        if value is not None and (value < least or (most is not None and value > most)):
            upper = "" if most is None else f" and at most {most}"
            raise ValueError(f"trainer.{name}={value} must be at least {least}{upper}{meaning}")


def check_run(name: str, fit_loop: Loop | None) -> None:
    """Refuse a name of a run that is no directory's, and a fit loop that is one of something else.

    Raises:
        ValueError: names the setting, its value and the fix.
    """
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"trainer.name={name!r} must be a plain directory name")
    if fit_loop is not None and fit_loop.stage != "fit":
        raise ValueError(f"trainer.fit_loop={type(fit_loop).__name__} is a loop of {fit_loop.stage}; give a SyncFitLoop")


def check_choice(setting: str, value: Any, known: Any) -> None:
    """Refuse a value that is none of a ``Literal``'s.

    Raises:
        ValueError: names the setting, its value and the choices.
    """
    if value not in get_args(known):
        raise ValueError(f"{setting}={value!r}: choose {', '.join(get_args(known))}")


def check_bound(fragments_per_update: int | None, train_async: bool, max_staleness: int) -> None:
    """Refuse settings of :class:`~vla_async.loops.StreamingFitLoop` for how much is in flight that cannot work.

    Raises:
        ValueError: names the setting, its value and the fix.
    """
    if fragments_per_update is not None and fragments_per_update < 1:
        raise ValueError(f"fit_loop.fragments_per_update={fragments_per_update} must be at least 1 (null: one per env)")
    if max_staleness < 0:
        raise ValueError(f"fit_loop.max_staleness={max_staleness} must not be negative")
    if train_async and max_staleness == 0:
        raise ValueError("fit_loop.max_staleness=0 lets no rollout run beside training; raise it, or set train_async=false")


def check_pair(policy: VLAPolicy, env: EnvFactory) -> None:
    """Refuse a policy and envs that do not go together, and envs that this machine cannot run.

    Raises:
        ValueError: names the setting and the fix.
        RuntimeError: names what is missing and how to install it.
    """
    policy.check_env(env)
    env.check()


def check_evaluation_device(device: str | None, beside_training: bool) -> None:
    """Refuse a device for evaluation that is not there, or of no use.

    Raises:
        ValueError: names the setting, its value and the fix.
    """
    if device is None:
        return
    setting = f"evaluate_loop.device={device!r}"
    if not beside_training:
        raise ValueError(f"{setting} is for evaluate_loop.beside_training=true; in turn, the device that trains evaluates")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{setting}: {error}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{setting}: choose cpu, or a CUDA device such as cuda:1")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{setting} does not exist, torch sees {torch.cuda.device_count()} CUDA devices")
