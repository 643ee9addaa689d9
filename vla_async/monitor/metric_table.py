"""The table of all metrics: whatever is logged has its name from here. ``docs/metrics.md`` is made of it.

Shares are parts of a whole, from 0 to 1. ``python -m vla_async.monitor.metric_table`` prints the table as Markdown.
"""

from __future__ import annotations

from vla_async.monitor.metric import Family, Metric

__all__ = ["TABLE", "Family", "Metric", "find", "markdown"]

# how a number is made of what happened in an update
_LAST, _SUM, _MEAN, _SINCE = "at the end", "sum", "mean", "sum since the start"
_BY_TIME, _PER_S = "share of the time", "sum over time"
_ELEMENTS = "mean over valid loss elements"
_EPISODES = "mean over episodes"
_RANK_0 = "at the end, rank 0"
_INTERVAL = "Wilson's 95 % interval"

# ---------------------------------------------------------------------- how far the run is: the x axes

STEP = Metric("step", "updates", _LAST, "Updates done, which is the policy_version; in sft, optimizer steps.")
ENV_STEPS = Metric("env_steps", "env steps", _SINCE, "Env steps of the decisions that were trained on.")
EPISODES = Metric("episodes", "episodes", _SINCE, "Training episodes that ended in what was trained on.")
ELAPSED_S = Metric("elapsed_s", "s", _SINCE, "Training time over all resumes; validation in turn is left out.")
LR = Metric("lr", "", _LAST, "Learning rate of the optimizer's first parameter group.")

# ---------------------------------------------------------------------- what the policy achieves

ROLLOUT_EPISODES = Family("rollout/episodes[/<task>]", "episodes", _SUM, "Training episodes that ended, while it explored.")
ROLLOUT_SUCCESS_ONCE = Family("rollout/success_once[/<task>]", "share", _EPISODES, "Success at any env step of an episode.")
ROLLOUT_SUCCESS_AT_END = Family("rollout/success_at_end[/<task>]", "share", _EPISODES, "Success at the last env step.")
ROLLOUT_RETURN = Family("rollout/return[/<task>]", "reward", _EPISODES, "Undiscounted return of a training episode.")
ROLLOUT_LENGTH = Family("rollout/episode_env_steps[/<task>]", "env steps", _EPISODES, "Length of a training episode.")
SUCCESS_ONCE = Family("<split>/success_once[/<task>]", "share", _EPISODES, "Success at any env step, on held-out seeds.")
SUCCESS_ONCE_LOW = Family(
    "<split>/success_once_low[/<task>]", "share", _INTERVAL, "Lower end of the interval of success_once."
)
SUCCESS_ONCE_HIGH = Family(
    "<split>/success_once_high[/<task>]", "share", _INTERVAL, "Upper end of the interval of success_once."
)
SUCCESS_AT_END = Family("<split>/success_at_end[/<task>]", "share", _EPISODES, "Success at the last env step.")
SUCCESS_AT_END_LOW = Family(
    "<split>/success_at_end_low[/<task>]", "share", _INTERVAL, "Lower end of the interval of success_at_end."
)
SUCCESS_AT_END_HIGH = Family(
    "<split>/success_at_end_high[/<task>]", "share", _INTERVAL, "Upper end of the interval of success_at_end."
)
EVALUATED_EPISODES = Family("<split>/episodes[/<task>]", "episodes", "sum", "Episodes that the rates rest on.")
EVALUATED_RETURN = Family("<split>/return[/<task>]", "reward", _EPISODES, "Undiscounted return of an evaluated episode.")
EVALUATED_LENGTH = Family("<split>/episode_env_steps[/<task>]", "env steps", _EPISODES, "Length of an evaluated episode.")
EVALUATED_VERSION = Family("<split>/policy_version", "updates", _LAST, "Updates behind the weights that were evaluated.")
SKIPPED = Metric(
    "validate/skipped", "validations", _SINCE, "Validations left out, as a newer one was due before their turn."
)

# ---------------------------------------------------------------------- throughput and time

ENV_STEPS_PER_S = Metric("time/env_steps_per_s", "env steps/s", _PER_S, "Env steps trained on per second of wall clock.")
DECISIONS_PER_S = Metric("time/decisions_per_s", "decisions/s", _PER_S, "Decisions consumed per second of wall clock.")
SAMPLES_PER_S = Metric("time/samples_per_s", "decisions/s", _PER_S, "Decisions trained on per second; each epoch counts.")
UPDATE_S = Metric("time/update_s", "s", _SUM, "Wall clock from the beginning of the update to its free slots.")
WAIT_S = Metric("time/wait_s", "s", _SUM, "Time in which the trainer had nothing to train on.")
ROLLOUT_S = Metric("time/rollout_s", "s", _SUM, "Time of the rollout, where it and training take turns.")
TRAIN_S = Metric("time/train_s", "s", _SUM, "Time of training, where it and the rollout take turns.")
PUBLISH_S = Metric("time/publish_s", "s", _SUM, "Time to hand the new weights over to the replicas.")
LAST_ARRIVAL_TO_STEP_S = Metric(
    "time/last_arrival_to_step_s", "s", _SUM, "From the update's last trajectory to the end of its first epoch."
)

# ---------------------------------------------------------------------- who waits for whom

WORKER_IDLE = Metric("worker/idle_share", "share", _BY_TIME, "Env workers neither stepped nor wrote: they waited.")
WORKER_NO_SLOT = Metric(
    "worker/no_slot_share", "share", _BY_TIME, "Env workers had an env without a free slot; part of their idle time."
)
WORKER_RESTARTS = Metric("worker/restarts", "processes", _SINCE, "Env workers that were replaced.")
REPLICA_IDLE = Metric(
    "replica/idle_share", "share", _BY_TIME, "Replicas did not compute: no request had come, or it waits for others."
)
TRAINER_IDLE = Metric("trainer/idle_share", "share", _BY_TIME, "The trainer had nothing to train on.")

# ---------------------------------------------------------------------- what becomes of trajectories

PRODUCED = Metric("queue/produced", "trajectories", _SINCE, "Finished; those consumed, dropped and in flight add up to it.")
CONSUMED = Metric("queue/consumed", "trajectories", _SINCE, "Trained on, and their slots given back.")
IN_FLIGHT = Metric("queue/in_flight", "trajectories", _LAST, "Finished and taken in, and neither consumed nor dropped.")
CUT = Metric("queue/cut", "trajectories", _SINCE, "Ended early, as they would have become too old.")
DROPPED = Family("queue/dropped/<reason>", "trajectories", _SINCE, "Thrown away, for that reason.")
WAITING = Metric("queue/waiting", "trajectories", _LAST, "Finished and not handed out yet.")
SLOTS = Metric("queue/slots", "slots", _LAST, "Slots in circulation; lowering η takes some out of it.")
OCCUPIED = Metric("queue/occupied_share", "share", "mean over hand-outs", "Slots in circulation that are not free.")

# ---------------------------------------------------------------------- how requests are batched

BATCH_MEAN = Metric("batch_size/mean", "rows", "mean over batches", "Rows of a replica's forward pass.")
BATCH_LIMIT = Metric("batch_size/limit", "rows", "max", "Bmax, or all rows of a replica if these are fewer.")
BATCH_SHARE = Family(
    "batch_size/share_<rows>", "share", "share of batches", "Batches with at most so many rows, and more than half as many."
)
REQUEST_WAIT_P50 = Metric("request_wait_s/p50", "s", "median", "How long a decision waited for its batch to begin.")
REQUEST_WAIT_P95 = Metric("request_wait_s/p95", "s", "95th percentile", "How long a decision waited for its batch to begin.")
REQUEST_WAIT_P99 = Metric("request_wait_s/p99", "s", "99th percentile", "How long a decision waited for its batch to begin.")
FORWARD_P50 = Metric("forward_s/p50", "s", "median", "How long a replica took for a batch.")
FORWARD_P95 = Metric("forward_s/p95", "s", "95th percentile", "How long a replica took for a batch.")

# ---------------------------------------------------------------------- how old the data is

STALENESS_MIN = Metric("staleness/min", "updates", "min", "Staleness of the freshest trajectory.")
STALENESS_MEAN = Metric("staleness/mean", "updates", "mean over trajectories", "Updates between deciding and training.")
STALENESS_MAX = Metric("staleness/max", "updates", "max", "Staleness of the oldest trajectory; never above the bound.")
STALENESS_BOUND = Metric("staleness/bound", "updates", _LAST, "η, as it is now; a callback may lower it.")
STALENESS_SHARE = Family("staleness/share_<age>", "share", "share of trajectories", "Trajectories of that staleness.")

# ---------------------------------------------------------------------- what an objective sees

LOSS = Family("<objective>/loss", "", _ELEMENTS, "All of the loss.")
POLICY_LOSS = Family("<objective>/policy_loss", "", _ELEMENTS, "The clipped surrogate, without the entropy bonus.")
VALUE_LOSS = Family("<objective>/value_loss", "return²", _ELEMENTS, "The critic's loss.")
ENTROPY = Family("<objective>/entropy", "nats", _ELEMENTS, "Entropy of the policy that is trained.")
ADVANTAGE = Family("<objective>/advantage", "", _ELEMENTS, "Advantage, after normalisation.")
RATIO = Family("<objective>/ratio", "", _ELEMENTS, "Probability ratio that is clipped; 1 is no change.")
LOG_RATIO = Family("<objective>/log_ratio", "nats", _ELEMENTS, "Magnitude of its logarithm.")
CLIP_FRACTION = Family(
    "<objective>/clip_fraction", "share", _ELEMENTS, "Elements whose ratio is clipped, so not trained on."
)
APPROX_KL = Family("<objective>/approx_kl", "nats", _ELEMENTS, "Estimated KL from the policy that the clip is centred on.")
LOG_PROB_GAP = Family(
    "<objective>/log_prob_gap", "nats", _ELEMENTS, "Magnitude of the acting policy's log-prob minus the trainer's."
)
IMPORTANCE_WEIGHT = Family("<objective>/importance_weight", "", _ELEMENTS, "Capped weight that corrects for age.")
CAPPED_FRACTION = Family("<objective>/capped_fraction", "share", _ELEMENTS, "Elements whose weight met the cap.")
VALUE_TARGET = Family("<objective>/value_target", "return", _ELEMENTS, "What the critic should have said.")
EXPLAINED_VARIANCE = Family(
    "<objective>/explained_variance", "share", _ELEMENTS, "Part of the targets' variance that the critic had foreseen."
)
REFERENCE_KL = Family("<objective>/reference_kl", "nats", _ELEMENTS, "Estimated KL from the policy at the run's start.")
GROUPS = Family("<objective>/groups", "groups", _SUM, "Groups of episodes.")
EQUAL_GROUPS = Family("<objective>/equal_groups", "groups", _SUM, "Groups whose outcomes were all the same: no signal.")
UNFINISHED = Family("<objective>/unfinished_trajectories", "trajectories", _SUM, "Left out, as their episode did not end.")
OUTCOME = Family("<objective>/outcome", "", _EPISODES, "What is compared within a group.")
GRAD_NORM = Metric("train/grad_norm", "", "mean over optimizer steps", "Norm of the gradient before clipping.")
SFT_NLL = Metric("sft/nll", "nats", _ELEMENTS, "Negative log-likelihood of what was demonstrated.")
SFT_SQUARED_ERROR = Metric("sft/squared_error", "action²", _ELEMENTS, "Squared distance to what was demonstrated.")
SFT_FLOW_MATCHING = Metric("sft/flow_matching", "action²", _ELEMENTS, "Squared error of the flow's velocity.")

# ---------------------------------------------------------------------- memory

_OWN = "Resident memory that is no file and not shared, of "
TRAINER_MIB = Metric("memory/trainer_mib", "MiB", _RANK_0, _OWN + "the trainer.")
WORKERS_MIB = Metric("memory/workers_mib", "MiB", "at the end, sum over processes", _OWN + "the env workers.")
REPLICAS_MIB = Metric("memory/replicas_mib", "MiB", "at the end, sum over processes", _OWN + "the replicas.")
SLAB_MIB = Metric("memory/slab_mib", "MiB", _LAST, "Shared memory that holds the trajectories.")
DEVICE_MIB = Metric("memory/trainer_device_mib", "MiB", "max, rank 0", "Memory of the trainer's tensors on its CUDA device.")

# ---------------------------------------------------------------------- what StreamingCollector.stats() has beside these

BATCH_HISTOGRAM = Metric("batch_size/histogram", "batches", _SINCE, "A list: batches by their number of rows, from 0 on.")
MEAN_QUEUED_ROWS = Metric("queue/mean_rows", "rows", "mean over batches", "Rows that stayed behind when a batch began.")
DECISIONS = Metric("decisions", "decisions", _SINCE, "Rows of all batches, values of the ends of slots included.")
WORKER_ENV_STEPS = Metric("env_steps/per_worker", "env steps", _SINCE, "A list: env steps executed by each worker.")
WORKER_BUSY_S = Metric("worker/busy_s", "s", _SINCE, "A list: time of each worker in its env and in writing.")
WORKER_NO_SLOT_S = Metric("worker/waiting_for_slots_s", "s", _SINCE, "A list: time of each worker without a free slot.")
RESTARTS = Metric("restarts", "processes", _SINCE, "Env workers that were replaced.")
UPTIME_S = Metric("uptime_s", "s", _SINCE, "Time since the replicas were given the policy.")
SLAB_BYTES = Metric("slab/bytes", "bytes", _LAST, "Shared memory that holds the trajectories.")

TABLE: dict[str, tuple[Metric | Family, ...]] = {
    "How far the run is": (STEP, ENV_STEPS, EPISODES, ELAPSED_S, LR),
    "What the policy achieves": (
        *(ROLLOUT_EPISODES, ROLLOUT_SUCCESS_ONCE, ROLLOUT_SUCCESS_AT_END, ROLLOUT_RETURN, ROLLOUT_LENGTH),
        *(SUCCESS_ONCE, SUCCESS_ONCE_LOW, SUCCESS_ONCE_HIGH, SUCCESS_AT_END, SUCCESS_AT_END_LOW, SUCCESS_AT_END_HIGH),
        *(EVALUATED_EPISODES, EVALUATED_RETURN, EVALUATED_LENGTH, EVALUATED_VERSION, SKIPPED),
    ),
    "Throughput and time": (
        *(ENV_STEPS_PER_S, DECISIONS_PER_S, SAMPLES_PER_S, UPDATE_S, WAIT_S, ROLLOUT_S, TRAIN_S, PUBLISH_S),
        LAST_ARRIVAL_TO_STEP_S,
    ),
    "Who waits for whom": (WORKER_IDLE, WORKER_NO_SLOT, WORKER_RESTARTS, REPLICA_IDLE, TRAINER_IDLE),
    "What becomes of trajectories": (PRODUCED, CONSUMED, IN_FLIGHT, CUT, DROPPED, WAITING, SLOTS, OCCUPIED),
    "How requests are batched": (
        *(BATCH_MEAN, BATCH_LIMIT, BATCH_SHARE, REQUEST_WAIT_P50, REQUEST_WAIT_P95, REQUEST_WAIT_P99),
        *(FORWARD_P50, FORWARD_P95),
    ),
    "How old the data is": (STALENESS_MIN, STALENESS_MEAN, STALENESS_MAX, STALENESS_BOUND, STALENESS_SHARE),
    "What is learned": (
        *(LOSS, POLICY_LOSS, VALUE_LOSS, ENTROPY, ADVANTAGE, RATIO, LOG_RATIO, CLIP_FRACTION, APPROX_KL, LOG_PROB_GAP),
        *(IMPORTANCE_WEIGHT, CAPPED_FRACTION, VALUE_TARGET, EXPLAINED_VARIANCE, REFERENCE_KL),
        *(GROUPS, EQUAL_GROUPS, UNFINISHED, OUTCOME, GRAD_NORM, SFT_NLL, SFT_SQUARED_ERROR, SFT_FLOW_MATCHING),
    ),
    "Memory": (TRAINER_MIB, WORKERS_MIB, REPLICAS_MIB, SLAB_MIB, DEVICE_MIB),
    "StreamingCollector.stats() alone": (
        *(BATCH_HISTOGRAM, MEAN_QUEUED_ROWS, DECISIONS, WORKER_ENV_STEPS, WORKER_BUSY_S, WORKER_NO_SLOT_S),
        *(RESTARTS, UPTIME_S, SLAB_BYTES),
    ),
}
"""The entries in reading order, by area."""


def find(name: str) -> Metric | Family | None:
    """The entry of a logged name; None for one that is not in the table, as of a user's own objective."""
    entries = (entry for area in TABLE.values() for entry in area)
    return next((entry for entry in entries if entry.labels_of(name) is not None), None)


def markdown() -> str:
    """The table as Markdown, a section for each area."""
    parts = []
    for area, entries in TABLE.items():
        rows = [f"| `{entry}` | {entry.unit or '–'} | {entry.reduced} | {entry.about} |" for entry in entries]
        parts.append(
            "\n".join(
                [f"### {area}", "", "| name | unit | over an update | what it says |", "| --- | --- | --- | --- |", *rows]
            )
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
