"""Findings about the pace: who waits for whom, and what for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vla_async.core_math import async_speedup
from vla_async.monitor.metric_table import (
    BATCH_LIMIT,
    BATCH_MEAN,
    FORWARD_P50,
    PUBLISH_S,
    REPLICA_IDLE,
    REQUEST_WAIT_P50,
    ROLLOUT_S,
    STALENESS_BOUND,
    TRAIN_S,
    TRAINER_IDLE,
    UPDATE_S,
    WORKER_IDLE,
    WORKER_NO_SLOT,
)
from vla_async.monitor.metrics import mean
from vla_async.report.findings_base import (
    LEAST_UPDATES,
    Finding,
    Kind,
    inside,
    named,
    percent,
    seconds,
    setting,
    settled,
    share,
    values,
)
from vla_async.report.run_data import RunData

BUSY = 0.15  # who waits for less than this share of the time could hardly do more: a queue without any wait is never stable
WAITS = 0.25  # who waits for more could do a third more, 1 / (1 - 0.25), which is worth a change
SMALL_BATCH = 0.25  # of the largest batch: per row, most of the fixed cost of a forward pass is then wasted
LONG_PUBLISH = 0.1  # of an update: more than measuring one run twice tells apart
LONG_PUBLISH_S = 0.05  # what it takes to wake all replicas, which no setting changes, is shorter


@dataclass(frozen=True)
class Shares:
    """What everybody does with the time after the warm-up, as parts of it.

    Attributes:
        trainer: it waits for data.
        replicas: they wait for requests; NaN if that is not known.
        stepping: the env workers step their envs, and write.
        slots: the env workers wait for a free slot.
        decisions: the env workers wait for the answers to their requests.
    """

    trainer: float
    replicas: float
    stepping: float
    slots: float
    decisions: float

    @classmethod
    def of(cls, run: RunData) -> Shares | None:
        """Those of a run; None if it is too short, or its loop does not tell."""
        lines = settled(run)
        trainer, idle = share(lines, TRAINER_IDLE), share(lines, WORKER_IDLE)
        if math.isnan(trainer) or math.isnan(idle) or values(lines, ROLLOUT_S):
            return None
        trainer, idle, replicas = map(_part, (trainer, idle, share(lines, REPLICA_IDLE)))
        slots = share(lines, WORKER_NO_SLOT)
        slots = 0.0 if math.isnan(slots) else min(slots, idle)
        return cls(trainer, replicas, 1.0 - idle, slots, idle - slots)


def _part(share: float) -> float:
    """A share as a part of the whole: what goes on while nobody measures the time can bring it beyond."""
    return share if math.isnan(share) else min(1.0, max(0.0, share))


def too_short(run: RunData) -> Iterator[Finding]:
    """A run of so few updates that they may all be warm-up; not one that made none of its own, as of ``sft`` or ``test``."""
    number = len(values(run.updates, TRAINER_IDLE))
    if 0 < number < LEAST_UPDATES:
        text = f"The run has {number} update{'s' * (number > 1)}, too few to say anything about its pace."
        yield Finding("note", text, f"fewer than {LEAST_UPDATES} updates")


def bottleneck(run: RunData) -> Iterator[Finding]:
    """Who keeps the others waiting.

    If the trainer waits for data, the rollouts are too slow: by what the workers spend their own time on. If it doesn't, it
    sets the pace, and workers that wait for slots are held back as they should be. If both wait for each other, there are
    too few slots between them.
    """
    shares = Shares.of(run)
    if shares is None:
        return
    if shares.trainer < BUSY:
        yield _trainer(run, shares)
    elif shares.slots >= BUSY:
        yield _slots(run, shares)
    else:
        yield _rollouts(run, shares)


def _trainer(run: RunData, shares: Shares) -> Finding:
    waits = f"The trainer waits {percent(shares.trainer)} of the time, and the env workers {percent(shares.slots)} for slots"
    if shares.slots < WAITS:
        text = f"{waits}: rollouts and training keep each other busy."
        return Finding("good", text, f"{TRAINER_IDLE} < {percent(BUSY)} and {WORKER_NO_SLOT} < {percent(WAITS)}")
    text = (
        f"{waits}: the trainer is the bottleneck, and the rollouts keep to its pace. More devices to train on "
        f"({inside(run, 'trainer.num_ranks')}), fewer passes ({inside(run, 'fit_loop.update_epochs')}), larger "
        f"micro-batches ({inside(run, 'fit_loop.micro_batch_size')}) or trainer.precision=bf16-mixed on a GPU would help; "
        "where replicas share its device, fit_loop.placement can give them another."
    )
    return Finding("problem", text, f"{TRAINER_IDLE} < {percent(BUSY)} and {WORKER_NO_SLOT} >= {percent(WAITS)}")


def _slots(run: RunData, shares: Shares) -> Finding:
    rule = f"{TRAINER_IDLE} >= {percent(BUSY)} and {WORKER_NO_SLOT} >= {percent(BUSY)}"
    both = (
        f"The trainer waits {percent(shares.trainer)} of the time for data while the env workers wait "
        f"{percent(shares.slots)} for free slots"
    )
    if run.last(STALENESS_BOUND) == 0.0:
        text = (
            f"{both}: rollouts and training take turns. fit_loop.train_async=true with fit_loop.max_staleness of 1 or more "
            "lets them go on beside each other."
        )
        return Finding("problem", text, f"{rule}, {STALENESS_BOUND} = 0")
    text = (
        f"{both}: there are too few slots between them. A larger {named(run, 'fit_loop.max_staleness')} or "
        f"{named(run, 'fit_loop.fragments_per_update')} makes more."
    )
    # the pace without the waits for slots, if nothing else changed
    left = 1.0 - (1.0 - shares.trainer) / (1.0 - shares.slots) if shares.slots < 1.0 else 0.0
    if left >= WAITS:
        text += f" The trainer would still wait about {percent(left)}: after that, rollouts have to become faster."
    return Finding("problem", text, rule)


def _rollouts(run: RunData, shares: Shares) -> Finding:
    kind: Kind = "problem" if shares.trainer >= WAITS else "note"
    waits = f"The trainer waits {percent(shares.trainer)} of the time for data"
    rule = f"{TRAINER_IDLE} >= {percent(BUSY)} (a problem from {percent(WAITS)} on), {WORKER_NO_SLOT} < {percent(BUSY)}"
    if shares.stepping >= shares.decisions:
        idle = "" if math.isnan(shares.replicas) else f" and the replicas are idle {percent(shares.replicas)}"
        text = (
            f"{waits}{idle}, while the env workers are busy {percent(shares.stepping)}: the environments are the "
            f"bottleneck. More envs at a time ({inside(run, 'env.num_envs')}; those that are not batched want a core each), "
            "faster env steps (smaller images, a simulator that steps a batch on a GPU) or longer chunks (env.chunk_size) "
            "would help."
        )
        return Finding(kind, text, f"{rule}; workers step for longer than they wait for decisions")
    waiting = f"{waits} and the env workers {percent(shares.decisions)} for decisions"
    if math.isnan(shares.replicas) or 1.0 - shares.replicas >= shares.decisions / 2:
        busy = "" if math.isnan(shares.replicas) else f", while the replicas are busy {percent(1.0 - shares.replicas)}"
        text = (
            f"{waiting}{busy}: the policy is the bottleneck. More replicas (fit_loop.placement.rollout_devices), a faster "
            "forward pass (fit_loop.compile_policy, fewer denoising steps, trainer.precision) or longer chunks "
            "(env.chunk_size) would help."
        )
        return Finding(kind, text, f"{rule}; workers wait for decisions for longer than they step")
    lockstep = setting(run, "fit_loop.async_interaction") is False
    fix = (
        "set fit_loop.async_interaction=true, so that nobody waits for the slowest env"
        if lockstep
        else f"lower {named(run, 'fit_loop.max_wait_s')}, or raise {named(run, 'fit_loop.envs_per_worker')}"
        if setting(run, "fit_loop.max_wait_s") != 0.0
        else f"raise {named(run, 'fit_loop.envs_per_worker')}, or {named(run, 'env.num_envs')}"
    )
    text = (
        f"{waiting}, yet the replicas are idle {percent(shares.replicas)}: requests wait for each other rather than for the "
        f"policy, and this interaction is the bottleneck; {fix}."
    )
    return Finding(kind, text, f"{rule}; workers wait for decisions for more than twice as long as replicas compute")


def turns(run: RunData) -> Iterator[Finding]:
    """A loop in which rollouts and training take turns."""
    lines = settled(run)
    rollout, train = mean(values(lines, ROLLOUT_S)), mean(values(lines, TRAIN_S))
    if not rollout + train > 0.0:  # also if they are NaN
        return
    part = rollout / (rollout + train)
    text = (
        f"Rollouts ({seconds(rollout)} per update, {percent(part)} of the time) and training ({seconds(train)}) take turns. "
        f"Overlapped by StreamingFitLoop, it would take {percent(1.0 / async_speedup(rollout, train))} of that at best."
    )
    yield Finding("note", text, f"the loop logs {ROLLOUT_S} and {TRAIN_S}")


def batches(run: RunData) -> Iterator[Finding]:
    """Requests that wait in vain for a batch to fill."""
    lines, shares = settled(run), Shares.of(run)
    rows, limit = mean(values(lines, BATCH_MEAN)), mean(values(lines, BATCH_LIMIT))
    wait, forward = mean(values(lines, REQUEST_WAIT_P50)), mean(values(lines, FORWARD_P50))
    small = limit > 1.0 and rows <= SMALL_BATCH * limit
    if shares is None or not small or not wait >= forward or shares.decisions < WAITS:
        return
    longest = setting(run, "fit_loop.max_wait_s")
    fix = (
        f"lower {named(run, 'fit_loop.max_wait_s')}, or set fit_loop.max_batch_size to about {math.ceil(rows)}"
        if longest
        else f"too few come at a time to fill one: more envs ({inside(run, 'env.num_envs')}), or fewer replicas"
    )
    text = (
        f"Batches have {rows:.1f} rows of at most {limit:.0f}, though half of the requests wait {seconds(wait)} or longer "
        f"for a forward pass of {seconds(forward)}: {fix}."
    )
    rule = (
        f"{BATCH_MEAN} <= {percent(SMALL_BATCH)} of {BATCH_LIMIT}, {REQUEST_WAIT_P50} >= {FORWARD_P50}, and workers wait "
        f"for decisions {percent(WAITS)} of the time or more"
    )
    yield Finding("problem", text, rule)


def publishing(run: RunData) -> Iterator[Finding]:
    """Handing over weights that takes a good part of the update."""
    lines = settled(run)
    publish, update = mean(values(lines, PUBLISH_S)), mean(values(lines, UPDATE_S))
    if publish >= max(LONG_PUBLISH * update, LONG_PUBLISH_S):
        text = (
            f"Handing the weights to the replicas takes {seconds(publish)}, {percent(publish / update)} of an update. "
            f"Larger updates ({inside(run, 'fit_loop.fragments_per_update')}) do it less often; with model.lora or "
            "model.freeze, where the policy has them, there is less to hand over."
        )
        rule = f"{PUBLISH_S} >= {percent(LONG_PUBLISH)} of {UPDATE_S}, and >= {seconds(LONG_PUBLISH_S)}"
        yield Finding("problem", text, rule)


PACE_RULES = (too_short, bottleneck, turns, batches, publishing)
