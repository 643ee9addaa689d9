"""What the machine has: shared memory, limits, cores, disk, and processes that start."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_async.doctor.apart import Ended, run_apart
from vla_async.doctor.check import Check, Status

MIB, GIB = 2**20, 2**30
LEAST_SHARED = 16 * MIB  # less holds no slab that is worth a run
LITTLE_SHARED = GIB  # less is too little for pictures: 16 envs, 64 decisions, two cameras of 224 pixels are 1.2 GiB
FILES_PER_PROCESS, FILES_AT_LEAST = 16, 256  # pipes, shared memory and the simulator's own files, with room to spare
THREADS_PER_PROCESS, THREADS_AT_LEAST = 8, 64  # what counts against the limit on processes: threads, too
LEAST_DISK, LITTLE_DISK = 50 * MIB, 5 * GIB  # no checkpoint of any policy; two of a small one, and videos
_START_TIMEOUT_S = 60.0


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:,.0f} MiB"


def shared_memory(free: int, slab: int | None) -> Check:
    """Where the trajectories lie.

    Args:
        free: bytes of /dev/shm that can be taken.
        slab: the least that the recipe's slab takes; None if there is no recipe, 0 if its loop has no slab.
    """
    more = (
        "in a container: docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm); elsewhere as "
        "root: mount -o remount,size=50% /dev/shm"
    )
    found = f"{size(free)} free"
    if slab:
        found += f"; the recipe's slab takes at least {size(slab)}"
    if free < max(slab or 0, LEAST_SHARED):
        lower = (
            "; or lower fit_loop.max_staleness, fragments_per_update, decisions_per_env or env.image_size" if slab else ""
        )
        return Check("shared memory", "fail", found, more + lower, needed=slab is None or slab > 0)
    if slab is None and free < LITTLE_SHARED:
        return Check("shared memory", "warn", f"{found}, which recipes with pictures may exceed", more)
    return Check("shared memory", "ok", found)


@dataclass(frozen=True)
class Limits:
    """What this user may have at a time; None for no limit.

    Attributes:
        files: open files of a process.
        files_at_most: what a process may raise that to.
        processes: processes and threads: the smallest limit of the user's and the container's.
    """

    files: int | None
    files_at_most: int | None
    processes: int | None

    @classmethod
    def look(cls) -> Limits:
        """Those of this process."""

        def of(limit: int) -> int | None:
            return None if limit == resource.RLIM_INFINITY else limit

        files, most = map(of, resource.getrlimit(resource.RLIMIT_NOFILE))
        group = Path("/sys/fs/cgroup/pids.max")
        text = group.read_text().strip() if group.is_file() else "max"
        both = [of(resource.getrlimit(resource.RLIMIT_NPROC)[0]), int(text) if text.isdigit() else None]
        return cls(files, most, min((limit for limit in both if limit is not None), default=None))


def limits(limits: Limits, processes: int) -> list[Check]:
    """Open files, and processes.

    Args:
        limits: what this user may have.
        processes: of the run: workers, replicas and ranks.
    """
    files, threads = FILES_AT_LEAST + FILES_PER_PROCESS * processes, THREADS_AT_LEAST + THREADS_PER_PROCESS * processes
    checks = []
    for name, limit, wanted, fix in (
        ("open files", limits.files, files, _more_files(limits, files)),
        ("processes and threads", limits.processes, threads, _more_processes(threads)),
    ):
        found = "no limit" if limit is None else f"at most {limit:,}"
        found += f"; a run takes up to {wanted:,}"
        status: Status = "ok" if limit is None or limit >= wanted else "fail"
        checks.append(Check(name, status, found, "" if status == "ok" else fix))
    return checks


def _more_files(limits: Limits, wanted: int) -> str:
    if limits.files_at_most is None or limits.files_at_most >= wanted:
        return f"ulimit -n {wanted}, in the shell that starts the run"
    return f"as root: a line `* hard nofile {wanted}` in /etc/security/limits.conf (docker run --ulimit nofile={wanted})"


def _more_processes(wanted: int) -> str:
    return (
        f"ulimit -u {wanted}; if that is refused, ask the administrator for a higher nproc, or pids limit of the container; "
        "or put several envs into a process: fit_loop.envs_per_worker"
    )


def cores(usable: float, workers: int, replicas: int, ranks: int) -> Check:
    """Whether everybody who computes has a core.

    Args:
        usable: cores of this process.
        workers: env workers.
        replicas: copies of the policy that act on a CPU.
        ranks: that train, on any device.
    """
    busy = workers + replicas + ranks
    found = f"{usable:g} usable, for {busy}: env workers {workers}, replicas on CPUs {replicas}, trainers {ranks}"
    if usable >= busy:
        return Check("cores", "ok", found)
    fix = (
        "it runs, but they take turns: lower env.num_envs, or use more cores (in a container: docker run --cpus; on a "
        "cluster: ask for more CPUs per task)"
    )
    return Check("cores", "warn", found, fix)


def disk(root: Path, free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free) -> Check:
    """Whether runs can be written.

    Args:
        root: the directory of all runs, which need not exist.
        free: bytes that are left where a path is.
    """
    name, place = "disk", root.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        fix = "set trainer.root_dir to a directory that you may write to"
        return Check(name, "fail", f"{place} cannot be written to: {error.strerror}", fix)
    left = free(place)
    fix = "set trainer.root_dir to a larger disk, or delete what old runs have left"
    if left < LEAST_DISK:
        return Check(name, "fail", f"{root}: {size(left)} free", fix)
    if left < LITTLE_DISK:
        return Check(name, "warn", f"{root}: {size(left)} free, which the checkpoints of a large policy may exceed", fix)
    return Check(name, "ok", f"{root}: {size(left)} free")


def processes(run: Callable[[Sequence[str], float], Ended] = run_apart) -> Check:
    """Whether processes can be started as a fleet starts them, and be heard.

    Args:
        run: runs the program that tries it: a server of forks that was started here would stay.
    """
    ended = run(["-m", "vla_async.doctor.fork_server"], _START_TIMEOUT_S)
    if ended.problem:
        fix = "see what it says; a sandbox may forbid to fork, or to connect by sockets in TMPDIR"
        return Check("worker processes", "fail", f"they do not start: {ended.problem}", fix)
    return Check("worker processes", "ok", "the fork server starts them, and they answer")
