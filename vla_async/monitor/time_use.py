"""Where the time of a run goes, by role, from its timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vla_async.monitor.report import Table
from vla_async.monitor.timeline import TRAINER, Slice
from vla_async.monitor.timeline_run import REPLICA, WORKER
from vla_async.monitor.timeline_track import LOOKS, Kind

STEPPING, RESETTING, NO_SLOT, NO_DECISION = "stepping", "resetting", "waiting for slots", "waiting for decisions"
FORWARD, SWAPPING, IDLE = "deciding", "swapping weights", "idle"
NO_DATA, NO_ENVS = "waiting for trajectories", "waiting for envs"
TRAINING = PREPARING, GRADIENTS, OPTIMIZER = "preparing", "forward and backward", "optimizer step"
_ENOUGH = 0.1  # of its time that a trainer may wait without anybody holding it up


class _Role(NamedTuple):
    """How the slices of a role's lanes are added up: what begins the lanes' names, and what its slices are counted as."""

    lane: str
    parts: dict[Kind, str]
    rest: str


_ROLES = {
    "env workers": _Role(WORKER, {Kind.ENV_STEPS: STEPPING, Kind.RESET: RESETTING, Kind.NO_SLOT: NO_SLOT}, rest=NO_DECISION),
    "replicas": _Role(REPLICA, {Kind.FORWARD: FORWARD, Kind.SWAP: SWAPPING}, rest=IDLE),
    "trainer": _Role(
        TRAINER,
        {
            Kind.WAIT: NO_DATA,
            Kind.DECIDE: FORWARD,
            Kind.ENVS: NO_ENVS,
            Kind.READ: PREPARING,
            Kind.PREPARE: PREPARING,
            Kind.MICRO_BATCH: GRADIENTS,
            Kind.OPTIMIZER: OPTIMIZER,
            Kind.MEET: "waiting for other ranks",
            Kind.PUBLISH: "publishing",
            Kind.VALIDATE: "validating",
            Kind.END_OF_STEP: "log and callbacks",
        },
        rest="rest",
    ),
}


@dataclass(frozen=True)
class RoleTime:
    """What the processes of a role have done.

    Attributes:
        processes: how many there are.
        shares: of their time, by what they did; together 1.
    """

    processes: int
    shares: dict[str, float]

    def share(self, *parts: str) -> float:
        """The share of some of it, together."""
        return sum(self.shares.get(part, 0.0) for part in parts)


@dataclass(frozen=True)
class TimeUse:
    """Where the time of some steps went.

    Attributes:
        steps: how many.
        seconds: from the beginning of the first to the end of the last.
        roles: those that had a process in the timeline.
        mean_batch: rows of a replica's batch; 0 if there was none.
    """

    steps: int
    seconds: float
    roles: dict[str, RoleTime]
    mean_batch: float

    @property
    def bottleneck(self) -> str:
        """Who waits for whom, in a sentence."""
        trainer = self.roles["trainer"]
        workers, replicas = self.roles.get("env workers"), self.roles.get("replicas")
        if workers is None or replicas is None:
            return (
                f"Rollouts and training take turns: of an update, the envs take {trainer.share(NO_ENVS):.0%}, decisions "
                f"{trainer.share(FORWARD):.0%} and training {trainer.share(*TRAINING):.0%}."
            )
        waits, stepping = trainer.share(NO_DATA), workers.share(STEPPING, RESETTING)
        deciding = replicas.share(FORWARD, SWAPPING)
        if waits < _ENOUGH:
            return (
                f"The trainer is the bottleneck: it waits for trajectories {waits:.0%} of its time, and env workers wait "
                f"for free slots {workers.share(NO_SLOT):.0%} of theirs."
            )
        who = "envs are" if stepping >= deciding else "replicas are"
        return (
            f"The {who} the bottleneck: the trainer waits for trajectories {waits:.0%} of its time, while env workers step "
            f"or reset {stepping:.0%} of theirs, and replicas decide {deciding:.0%} of theirs."
        )

    def table(self, title: str) -> Table:
        """A row for all that each role does: seconds per update, of one process of the role, and the share."""
        table = Table(["", "s per update", "share"], title=title)
        each = self.seconds / self.steps
        for name, role in self.roles.items():
            batches = f", {self.mean_batch:.1f} rows per batch" if name == "replicas" else ""
            table.rows.append([f"{name} ({role.processes}{batches})", f"{each:.3f}", "100.0%"])
            table.rows += [[f"  {part}", f"{share * each:.3f}", f"{share:.1%}"] for part, share in role.shares.items()]
        return table

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        roles = {name: {"processes": role.processes, "shares": role.shares} for name, role in self.roles.items()}
        each = {"seconds_per_update": self.seconds / self.steps, "mean_batch": self.mean_batch}
        return {"updates": self.steps, **each, "roles": roles, "bottleneck": self.bottleneck}


def time_use(slices: Sequence[Slice], first: int, last: int) -> TimeUse:
    """Where the time of the steps from ``first`` to ``last`` went.

    Args:
        slices: of a timeline.
        first: number of a step.
        last: number of a step, none before ``first``.

    Raises:
        ValueError: if the timeline has not all of these steps.
    """
    own = {slice.args["step"]: slice for slice in slices if slice.lane == f"{TRAINER} 0" and "step" in slice.args}
    if missing := [step for step in range(first, last + 1) if step not in own]:
        raise ValueError(f"the timeline has no step {missing[0]}; it has {sorted(own)}")
    start, end = own[first].start_s, own[last].end_s
    roles = {}
    for name, role in _ROLES.items():
        lanes = {slice.lane for slice in slices if slice.lane.startswith(role.lane)}
        if lanes:
            roles[name] = RoleTime(len(lanes), _shares(role, [s for s in slices if s.lane in lanes], start, end, len(lanes)))
    forward = LOOKS[Kind.FORWARD].name
    batches = [s.args["rows"] for s in slices if s.name == forward and s.end_s > start and s.start_s < end]
    return TimeUse(last - first + 1, end - start, roles, sum(batches) / max(1, len(batches)))


def _shares(role: _Role, slices: Iterable[Slice], start: float, end: float, lanes: int) -> dict[str, float]:
    """The share of each part; what no slice of a part covers is the rest."""
    parts = {LOOKS[kind].name: part for kind, part in role.parts.items()}
    seconds: dict[str, float] = defaultdict(float)
    inside: list[Slice] = []  # the slices around the one that is looked at
    for slice in slices:  # by lane and time, the outer one first
        while inside and (inside[-1].lane != slice.lane or inside[-1].end_s <= slice.start_s):
            inside.pop()
        length = max(0.0, min(slice.end_s, end) - max(slice.start_s, start))
        around = next((parts[outer.name] for outer in reversed(inside) if outer.name in parts), None)
        if slice.name in parts:
            seconds[parts[slice.name]] += length
            if around is not None:
                seconds[around] -= length
        inside.append(slice)
    whole = (end - start) * lanes
    shares = {part: seconds[part] / whole for part in dict.fromkeys(parts.values()) if seconds[part] > 0.0}
    return shares | {role.rest: max(0.0, 1.0 - sum(shares.values()))}
