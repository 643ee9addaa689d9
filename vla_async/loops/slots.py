"""``SlotPlan``: what the slots of a streaming fit hold, how many there are, and which settings cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_async.collectors.groups import Grouping
from vla_async.collectors.shards import MOST_SLOTS, least_slots, make_shards, place_envs
from vla_async.collectors.wires import EnvAddress
from vla_async.envs.base import EnvFactory
from vla_async.objectives.base import Objective


@dataclass(frozen=True)
class SlotPlan:
    """How the decisions of an update are cut into slots.

    Attributes:
        decisions: T, the most in a slot.
        slots: that an update consumes, at most: members of groups may be lost.
        bundles: into which these are grouped.
        envs: where they are, and who decides for them.
        lockstep: whether the envs of a replica decide together.
        grouping: of the rows, where each slot holds one episode; None where slots hold fragments.
    """

    decisions: int
    slots: int
    bundles: int
    envs: Sequence[EnvAddress]
    lockstep: bool
    grouping: Grouping | None

    @classmethod
    def make(
        cls,
        env: EnvFactory,
        objective: Objective,
        *,
        decisions_per_env: int,
        fragments_per_update: int | None,
        envs_per_worker: int,
        num_stages: int,
        num_replicas: int,
        lockstep: bool,
    ) -> SlotPlan:
        """Work it out.

        Raises:
            ValueError: if the envs cannot be grouped, or an update would consume parts of groups.
        """
        slots = fragments_per_update or env.num_envs
        shards, _ = make_shards(env, envs_per_worker, num_stages)
        rows = env.num_envs // num_stages if env.is_batched else 1
        envs = place_envs([[rows] * len(shard) for shard in shards], num_replicas)
        if not objective.needs_whole_episodes:
            return cls(decisions_per_env, slots, slots, envs, lockstep, None)
        grouping = _grouping(env, objective)
        if slots % grouping.size:
            raise ValueError(
                f"fit_loop.fragments_per_update={slots} must be a multiple of objective.group_size={grouping.size}, for "
                f"an update consumes whole groups; make it {-(-slots // grouping.size) * grouping.size}"
            )
        longest = -(-env.max_episode_steps // env.chunk_size)
        return cls(longest, slots, slots // grouping.size, envs, lockstep, grouping)

    def least(self, slots: int) -> int:
        """How many slots there must be, if an update consumes ``slots`` of them.

        With fewer, envs could wait for each other for ever, or some would never run.
        """
        if self.grouping is not None:
            return self.grouping.num_rows
        return least_slots(self.envs, self.lockstep, slots)

    def check_room(self, max_staleness: int) -> None:
        """Refuse a bound on staleness with which there would be too few slots, or more than can be handed over.

        Raises:
            ValueError: names the settings and the fix.
        """
        room, least = (max_staleness + 1) * self.slots, self.least(self.slots)
        now = (
            f"fit_loop.fragments_per_update={self.slots} and max_staleness={max_staleness} have room for {room} trajectories"
        )
        if room < least:
            need = -(-least // self.slots) - 1
            fixes = [f"raise max_staleness to {need}" + ("" if max_staleness else " (with train_async)")]
            if slots := self._enough(max_staleness):
                fixes.append(f"fragments_per_update to {slots}")
            raise ValueError(
                f"{now}, but the envs need {least}, or some would never run, or all wait for each other; "
                + ", or ".join(fixes)
            )
        if room > MOST_SLOTS:
            raise ValueError(f"{now}, but {MOST_SLOTS} are as many as can be handed over; lower one of them")

    def check_devices(self, number: int) -> None:
        """Refuse more devices to act on than can have envs.

        Raises:
            ValueError: names the setting and the fix.
        """
        workers = len({env.worker for env in self.envs})
        if number > workers:
            raise ValueError(
                f"fit_loop.placement.rollout_devices has {number} devices, but all envs of a worker are answered by one, "
                f"and there are {workers} workers: some devices would do nothing; give at most {workers}"
            )

    def _enough(self, max_staleness: int) -> int | None:
        """The next larger number of slots per update that leaves room enough; None if there is none."""
        unit = 1 if self.grouping is None else self.grouping.size
        most = self.slots + 2 * sum(len(env.rows) for env in self.envs)
        larger = range(self.slots + unit, most + 1, unit)
        return next((slots for slots in larger if (max_staleness + 1) * slots >= self.least(slots)), None)


def _grouping(env: EnvFactory, objective: Objective) -> Grouping:
    tasks, size = len(env.task_names), objective.group_size
    if env.num_envs % (tasks * size):
        raise ValueError(
            f"env.num_envs={env.num_envs} must be a multiple of {tasks * size}: each of {tasks} tasks needs whole groups "
            f"of objective.group_size={size}; make it {-(-env.num_envs // (tasks * size)) * tasks * size}"
        )
    return Grouping(size, env.num_envs, tasks)
