"""``SlotPlan``: what the slots of a streaming fit hold, how many there are, and which settings cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from vla_async.collectors.groups import Grouping
from vla_async.collectors.shards import least_slots, make_shards, place_envs
from vla_async.envs.base import EnvFactory
from vla_async.objectives.base import Objective


@dataclass(frozen=True)
class SlotPlan:
    """How the decisions of an update are cut into slots.

    Attributes:
        decisions: T, the most in a slot.
        slots: that an update consumes, at most: members of groups may be lost.
        bundles: into which these are grouped.
        least: slots without which envs could wait for each other for ever, or some would never run.
        grouping: of the rows, where each slot holds one episode; None where slots hold fragments.
    """

    decisions: int
    slots: int
    bundles: int
    least: int
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
        if objective.needs_whole_episodes:
            grouping = _grouping(env, objective)
            if slots % grouping.size:
                raise ValueError(
                    f"fit_loop.fragments_per_update={slots} must be a multiple of objective.group_size={grouping.size}, for "
                    f"an update consumes whole groups; make it {-(-slots // grouping.size) * grouping.size}"
                )
            longest = -(-env.max_episode_steps // env.chunk_size)
            return cls(longest, slots, slots // grouping.size, env.num_envs, grouping)
        rows = env.num_envs // num_stages if env.is_batched else 1
        envs = place_envs([[rows] * len(shard) for shard in shards], num_replicas)
        return cls(decisions_per_env, slots, slots, least_slots(envs, lockstep, slots), None)

    def check_room(self, max_staleness: int) -> None:
        """Refuse a bound on staleness with which there would be too few slots.

        Raises:
            ValueError: names the settings and the fix.
        """
        room = (max_staleness + 1) * self.slots
        if room < self.least:
            need = -(-self.least // self.slots) - 1
            raise ValueError(
                f"fit_loop.fragments_per_update={self.slots} and max_staleness={max_staleness} have room for {room} "
                f"trajectories, but the envs need {self.least}, or some would never run, or all wait for each other; raise "
                f"max_staleness to {need}, or fragments_per_update to {-(-self.least // (max_staleness + 1))}"
            )


def _grouping(env: EnvFactory, objective: Objective) -> Grouping:
    tasks, size = len(env.task_names), objective.group_size
    if env.num_envs % (tasks * size):
        raise ValueError(
            f"env.num_envs={env.num_envs} must be a multiple of {tasks * size}: each of {tasks} tasks needs whole groups "
            f"of objective.group_size={size}; make it {-(-env.num_envs // (tasks * size)) * tasks * size}"
        )
    return Grouping(size, env.num_envs, tasks)
