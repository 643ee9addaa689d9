"""``Rollouts``: a fleet as a fit loop sees it, one update at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from vla_async import keys
from vla_async.collectors.board import SlotState
from vla_async.collectors.episodes import Episode
from vla_async.collectors.fleet import Fleet
from vla_async.collectors.orders import RowCounts
from vla_async.collectors.row_env import LENGTH, RETURN, SEED, TASK
from vla_async.collectors.slab import MASK, TRAJ_IDS, Slab, read_texts
from vla_async.data.counts import counts_when_saved
from vla_async.data.in_flight import InFlight, save_bundles
from vla_async.data.queue import Straggler
from vla_async.data.selection import Selection
from vla_async.data.slot_episodes import SlotRecorder
from vla_async.data.staleness import StalenessMeter, stamp_staleness
from vla_async.data.trajectory_store import store_of
from vla_async.loops.pace import Pace
from vla_async.loops.slots import SlotPlan
from vla_async.monitor import metric_table as names
from vla_async.monitor.timeline_track import Kind

if TYPE_CHECKING:
    from vla_async.state import Counters
    from vla_async.trainer import AsyncTrainer


class Rollouts:
    """Takes the trajectories of each update off the queue, and gives their slots back when the replicas know better.

    Args:
        fleet: open, not serving yet.
        plan: what its slots hold.
        trainer: whose policy acts.
        straggler: what becomes of a trajectory in progress that would get too old.
        selection: which trajectories are preferred.
        max_staleness: η. A run that is resumed with the η that it had goes on with what that was lowered to.
        in_flight: whether checkpoints hold, and a resumed run consumes, what was finished and not consumed.
        state: of an earlier run, from :meth:`state_dict`.

    Attributes:
        max_staleness: η, as it is now.
        episodes: those that ended in what this update has taken.
        env_steps: executed in what this update has taken.
        decisions: in it that are no padding.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: SlotPlan,
        trainer: AsyncTrainer,
        straggler: Straggler,
        selection: Selection,
        max_staleness: int,
        in_flight: InFlight,
        state: dict[str, Any] | None,
    ) -> None:
        self.fleet, self.plan, self.device, self.timeline = fleet, plan, trainer.fabric.device, trainer.timeline
        self.straggler, self.selection, self.in_flight = straggler, selection, in_flight
        self._set_staleness = max_staleness
        unchanged = state is not None and state["max_staleness_set"] == max_staleness
        self.max_staleness = state["max_staleness"] if state is not None and unchanged else max_staleness
        if state and len(state["counts"]["episodes"]) != fleet.num_rows:
            raise ValueError(
                f"the checkpoint is of a run with env.num_envs={len(state['counts']['episodes'])}, not {fleet.num_rows}; "
                "resume it with as many, or start a new run from its weights with trainer.init_from"
            )
        fleet.serve(
            trainer.policy,
            decisions=plan.decisions,
            num_slots=(self.max_staleness + 1) * plan.slots,
            grouping=plan.grouping,
            version=trainer.state.counters.step,
            counts=RowCounts(**state["counts"]) if state else None,
            waiting=state.get("waiting") if state and in_flight == "save" else None,
            sized_by="fit_loop.max_staleness, fragments_per_update or decisions_per_env",
        )
        if state:
            fleet.queue.resume(state["queue"])
        self.recorder = SlotRecorder(fleet.slab, fleet.envs, trainer.env, store_of(trainer))
        self.begin(trainer.state.counters.step)

    def begin(self, version: int) -> None:
        """Begin the update that makes ``version + 1`` of ``version``."""
        self.version, self.env_steps, self.decisions = version, 0, 0
        self.episodes: list[Episode] = []
        self._slots: list[int] = []
        self._staleness, self._pace, self._arrived = StalenessMeter(self.max_staleness), Pace(self.fleet), 0.0
        self._timing = dict[str, float]()
        self.recorder.begin(version)

    def arrivals(self) -> Iterator[TensorDictBase]:
        """The trajectories of the update, each (or each group) as soon as it is there: TensorDicts ``[N, T]``."""
        for number in range(self.plan.bundles):
            yield self._take(1, earlier=number)

    def collect(self) -> TensorDictBase:
        """All trajectories of the update, ordered by env: TensorDict ``[N, T]`` on the trainer's device."""
        return self._take(self.plan.bundles)

    def trained(self) -> None:
        """Note that the first epoch, which streams, is over."""
        self._timing[names.LAST_ARRIVAL_TO_STEP_S] = time.perf_counter() - self._arrived

    def _take(self, count: int, earlier: int = 0) -> TensorDictBase:
        with self._pace.waiting(), self.timeline.span(Kind.WAIT):
            slots = self._choose(count, earlier)
        self._count_waiting()
        with self.timeline.reading(slots):
            trajectories = read_trajectories(self.fleet.slab, slots, grouped=self.plan.grouping is not None)
            self._account(slots, trajectories)
        return trajectories.to(self.device, non_blocking=True)

    def _count_waiting(self) -> None:
        """Note in the timeline how many slots are finished and not taken."""
        if self.timeline.is_on:
            self.timeline.count("queue", waiting=self.fleet.board.slots_in(SlotState.FINISHED))

    def _choose(self, count: int, earlier: int = 0) -> list[int]:
        """Wait for so many bundles, of which ``earlier`` were taken before; their slots, ordered by env."""
        later = self.plan.bundles - earlier - count
        slots = self.fleet.queue.take(
            count,
            self.version,
            self.max_staleness,
            earlier=earlier,
            later=later,
            straggler=self.straggler,
            selection=self.selection,
        )
        if not slots:
            raise RuntimeError("the wait for trajectories was ended from elsewhere")
        self._arrived = time.perf_counter()
        self._pace.meter.look()
        slots.sort(key=self._order)
        self._slots += slots
        return slots

    def _account(self, slots: list[int], trajectories: TensorDictBase) -> None:
        """Count what some slots hold, and stamp the staleness."""
        self._staleness.add(stamp_staleness(trajectories, self.version))
        self.env_steps += int(trajectories[keys.EXECUTED].sum())
        self.decisions += int(trajectories[keys.EXECUTED].any(-1).sum())
        self.episodes += self._ended(slots)
        self.recorder.add(slots)

    def _order(self, slot: int) -> tuple[int, int]:
        """By env, then by time."""
        first = int(self.fleet.slab.rows(TRAJ_IDS)[slot * self.fleet.slab.layout.rows_per_slot])
        return first % self.fleet.num_rows, first

    def _ended(self, slots: list[int]) -> list[Episode]:
        """The episodes that ended in some slots."""
        slab, ended = self.fleet.slab, []
        for slot in slots:
            first = slot * slab.layout.rows_per_slot
            steps = np.flatnonzero(slab.rows(keys.DONE[1:]).numpy()[first : first + int(slab.length[slot]), 0])
            rows = torch.from_numpy(first + steps)
            final = slab.next_rows(torch.tensor([slot]))[0, torch.from_numpy(steps)]
            tasks = read_texts(slab.rows(TASK)[rows], (len(rows),)).tolist() if len(rows) else []
            for task, row, last in zip(tasks, rows.tolist(), final.tolist(), strict=True):
                ended.append(
                    Episode(
                        task=task,
                        seed=int(slab.rows(SEED)[row]),
                        success_once=bool(slab.rows(keys.SUCCESS_ONCE[1:])[last]),
                        success_at_end=bool(slab.rows(keys.SUCCESS[1:])[last]),
                        episode_return=float(slab.rows(RETURN)[row]),
                        env_steps=int(slab.rows(LENGTH)[row]),
                    )
                )
        return ended

    def publish(self, version: int) -> None:
        """Hand the update's weights to the replicas, then its slots to the envs."""
        started = time.perf_counter()
        assert self.fleet.publisher is not None
        ages = self._staleness.metrics()
        self.timeline.count("staleness", mean=ages[names.STALENESS_MEAN], max=ages[names.STALENESS_MAX])
        with self.timeline.span(Kind.PUBLISH, version):
            self.fleet.publisher.publish(version, self._weights())
        self._count_waiting()
        self.fleet.queue.release(self._slots)
        self.fleet.queue.check_balance()
        self._timing[names.PUBLISH_S] = time.perf_counter() - started

    def _weights(self) -> Any:
        """What to publish; None for the policy that the fleet was given."""
        return None

    def close(self) -> None:
        """End what this has begun itself; the fleet goes on."""

    def lower_staleness(self, max_staleness: int) -> None:
        """Lower η, from the next update on: as many slots fewer are in circulation as have room in the updates less.

        What is under way already and is too old then, is dropped and counted as ``stale``: no pacing can help any more.

        Raises:
            ValueError: if that is no lower bound, or leaves too few slots.
        """
        if not 0 <= max_staleness <= self.max_staleness:
            raise ValueError(
                f"max_staleness={max_staleness} cannot be set while it runs: it is {self.max_staleness}, lower it"
            )
        self.plan.check_room(max_staleness)
        self.fleet.queue.withhold((self.max_staleness - max_staleness) * self.plan.slots)
        self.max_staleness = max_staleness

    def metrics(self, samples: float) -> dict[str, float]:
        """What to log of the update, in which so many decisions were trained on, counted in each epoch."""
        took = self._pace.took
        return {
            **self._staleness.metrics(),
            **self._pace.metrics(took),
            **self._timing,
            names.STALENESS_BOUND: float(self.max_staleness),
            names.ENV_STEPS_PER_S: self.env_steps / took,
            names.DECISIONS_PER_S: self.decisions / took,
            names.SAMPLES_PER_S: samples / took,
        }

    def live(self, counters: Counters) -> dict[str, float]:
        """Of the metrics, those that tell how the update goes so far. Any thread may ask, at any time.

        Returns:
            None of an update that has been counted: what is validated after it is none of its time.
        """
        if counters.step != self.version:
            return {}
        return {**self._pace.live(), names.ENV_STEPS: float(counters.env_steps + self.env_steps)}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: how far the random streams are, and what was counted."""
        counts, queue = asdict(self.fleet.counts), self.fleet.queue.counts()
        return {"counts": counts, "queue": queue, **self._bounds()}

    def _bounds(self) -> dict[str, int]:
        """η as it is, and as it was set."""
        return {"max_staleness": self.max_staleness, "max_staleness_set": self._set_staleness}

    def snapshot(self) -> dict[str, Any]:
        """What :func:`completed` adds to a state when a checkpoint is written; copies the slots that are to be saved."""
        if self.in_flight == "drop":
            return self._bounds()
        bundles, in_progress = self.fleet.queue.unconsumed()
        waiting = save_bundles(self.fleet.slab, bundles)
        state = self.state_dict()  # after the slots: no episode that one of them holds is played again
        return state | {"waiting": waiting, "in_progress": in_progress}

    def report(self) -> str:
        """One line about what became of all trajectories."""
        counts = self.fleet.queue.counts()
        return "trajectories: " + ", ".join(f"{number} {name.replace('/', ': ')}" for name, number in counts.items())


def completed(state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The state of some rollouts as a checkpoint holds it.

    Args:
        state: from :meth:`Rollouts.state_dict`, as it was when the step ended that the checkpoint is of.
        now: from :meth:`Rollouts.snapshot`.
    """
    if "waiting" not in now:
        return state | now
    queue = counts_when_saved(now["queue"], state["queue"]["consumed"], now["in_progress"])
    return {name: value for name, value in now.items() if name != "in_progress"} | {"queue": queue}


def read_dealt(slab: Slab, slots: list[int], device: torch.device, *, grouped: bool, version: int) -> TensorDictBase:
    """The trajectories of some slots as a rank trains on them, stamped with their staleness at ``version``."""
    trajectories = read_trajectories(slab, slots, grouped=grouped)
    stamp_staleness(trajectories, version)
    return trajectories.to(device, non_blocking=True)


def read_trajectories(slab: Slab, slots: list[int], *, grouped: bool) -> TensorDictBase:
    """Copy slots out of a slab: TensorDict ``[N, T]`` as objectives want it, on the CPU."""
    trajectories = slab.read(slots, texts=False)
    if MASK in trajectories.keys(True):  # what a shorter trajectory leaves of its slot is no part of it
        trajectories[keys.EXECUTED] &= trajectories.pop(MASK).unsqueeze(-1)
    if grouped:
        trajectories[keys.GROUP_ID] = trajectories[keys.GROUP_ID][:, :1].expand(*trajectories.shape, 1).clone()
    return trajectories
