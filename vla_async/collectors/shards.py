"""What a fleet is made of, and which settings it refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from torchrl.envs import EnvBase

from vla_async.collectors.env_worker import EnvSource
from vla_async.collectors.groups import Grouping
from vla_async.collectors.orders import FleetSettings
from vla_async.collectors.wires import EnvAddress
from vla_async.envs.base import EnvFactory

MOST_SLOTS = 2**14  # by a pipe, 4 bytes for each
EnvSources = EnvFactory | Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]]


def make_shards(
    create_env_fn: EnvSources, envs_per_worker: int, num_stages: int, grouping: Grouping | None = None
) -> tuple[list[list[EnvSource]], bool]:
    """The envs of each worker, and whether there is just one callable.

    Raises:
        ValueError: if they cannot be cut that way.
    """
    if envs_per_worker < 1:
        raise ValueError(f"envs_per_worker={envs_per_worker} must be at least 1")
    batched = isinstance(create_env_fn, EnvFactory) and create_env_fn.is_batched
    if num_stages != 1 and not batched:
        raise ValueError(
            f"num_stages={num_stages} cuts a batched factory into groups, but these envs are not batched; set it to 1"
        )
    if isinstance(create_env_fn, EnvFactory):
        if not batched:
            sources = [EnvSource(create_env_fn, index, grouping) for index in range(create_env_fn.num_envs)]
        else:
            if num_stages < 1 or create_env_fn.num_envs % num_stages:
                raise ValueError(f"num_stages={num_stages} must divide env.num_envs={create_env_fn.num_envs}")
            rows = create_env_fn.num_envs // num_stages
            part = dataclasses.replace(create_env_fn, num_envs=rows)
            return [[EnvSource(part, stage * rows, grouping) for stage in range(num_stages)]], False
    elif callable(create_env_fn):
        return [[EnvSource(create_env_fn)]], True
    else:
        sources = [EnvSource(make) for make in create_env_fn]
    if not sources or not all(isinstance(source.make, EnvFactory) or callable(source.make) for source in sources):
        raise ValueError(
            "create_env_fn must be an EnvFactory, a callable that returns an EnvBase, or a list of such callables"
        )
    return [sources[start : start + envs_per_worker] for start in range(0, len(sources), envs_per_worker)], False


def place_envs(
    num_rows: Sequence[Sequence[int]], num_replicas: int, assignment: Sequence[int] | None = None
) -> list[EnvAddress]:
    """Number the rows, and assign the workers to replicas.

    Args:
        num_rows: for each worker, the rows of each of its envs.
        num_replicas: how many there are.
        assignment: for each worker, the replica that answers it; round-robin by default.
    """
    first, envs = 0, list[EnvAddress]()
    for worker, sizes in enumerate(num_rows):
        replica = worker % num_replicas if assignment is None else assignment[worker]
        for place, size in enumerate(sizes):
            envs.append(EnvAddress(worker, place, range(first, first + size), replica))
            first += size
    return envs


def check_counts(**counts: int | None) -> None:
    """Refuse settings below 1; None is no setting.

    Raises:
        ValueError: names the setting and its value.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_slots(
    envs: Sequence[EnvAddress], lockstep: bool, *, max_in_flight: int, fragments: int, fragment_length: int
) -> None:
    """Refuse so few slots that all envs can wait for one while no batch is complete.

    Args:
        envs: all of them.
        lockstep: whether the envs of a replica ask together, or only the rows of an env.
        max_in_flight: M.
        fragments: B, of a batch.
        fragment_length: T.

    Raises:
        ValueError: names the settings and the fix.
    """
    teams = _teams(envs, lockstep)
    rows, slots = teams.total(), max_in_flight * fragments
    what = f"max_in_flight={max_in_flight} batches of {fragments} fragments"
    if slots < rows:
        raise ValueError(
            f"{what} are fewer than the {rows} envs: some could never run; raise frames_per_batch or max_in_flight, or "
            "lower fragment_length"
        )
    least = least_slots(envs, lockstep, fragments)
    if slots < least:
        fix = f"make frames_per_batch a multiple of {rows * fragment_length}, or " if len(teams) == 1 else ""
        raise ValueError(
            f"{what} are too few for {rows} envs of which {max(teams.values())} must decide together: all could wait for "
            f"each other; {fix}raise max_in_flight to {-(-least // fragments)}"
        )
    if slots > MOST_SLOTS:
        raise ValueError(f"{what} are more than {MOST_SLOTS}, as many as can be handed over; raise fragment_length")


def _teams(envs: Sequence[EnvAddress], lockstep: bool) -> Counter[int]:
    """How many rows decide together, by team."""
    teams = Counter[int]()
    for env in envs:
        teams[env.replica if lockstep else env.rows.start] += len(env.rows)
    return teams


def least_slots(envs: Sequence[EnvAddress], lockstep: bool, fragments: int) -> int:
    """With how many slots for fragments no env ever has to wait for a slot that only comes back after its own decisions.

    Args:
        envs: all of them.
        lockstep: whether the envs of a replica ask together, or only the rows of an env.
        fragments: of a batch.
    """
    teams = _teams(envs, lockstep)
    rows, sizes = teams.total(), set(teams.values())
    # A team that lacks a single slot waits with all the others that it has, and they are missing in the batch. Slots for
    # whole teams are safe only where one team at a time takes some.
    one_by_one = len(teams) == 1 or (not lockstep and len({env.worker for env in envs}) == 1)
    if one_by_one and len(sizes) == 1 and fragments % max(sizes) == 0:
        return rows
    return max(rows, fragments + rows - len(teams))


def check_assignment(settings: FleetSettings, num_workers: int) -> None:
    """Refuse an assignment of workers to replicas that names others than there are.

    Raises:
        ValueError: names it and what it must be.
    """
    given, replicas = settings.assignment, len(settings.policy_devices)
    if given is not None and (len(given) != num_workers or not all(0 <= replica < replicas for replica in given)):
        raise ValueError(f"assignment={given} must give each of {num_workers} workers a replica from 0 to {replicas - 1}")
