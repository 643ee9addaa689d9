"""What the report draws: a table of charts, in reading order."""

from __future__ import annotations

from functools import partial

from vla_async.monitor import metric_table as m
from vla_async.report.chart_kinds import HeatMap, Lines, Section, Series

_evaluated = partial(Series, label="held-out episodes", source="evaluations")
_training = partial(Series, label="while training")
_SUCCESS = (
    _evaluated(m.SUCCESS_ONCE, band=(m.SUCCESS_ONCE_LOW, m.SUCCESS_ONCE_HIGH)),
    _training(m.ROLLOUT_SUCCESS_ONCE),
)
_AT_END = (
    _evaluated(m.SUCCESS_AT_END, band=(m.SUCCESS_AT_END_LOW, m.SUCCESS_AT_END_HIGH)),
    _training(m.ROLLOUT_SUCCESS_AT_END),
)
_success = partial(Lines, unit="share", together=True, smooth=True, whole=True)
_noisy = partial(Lines, smooth=True)

LEARNING = Section(
    "learning",
    "Learning",
    "What the policy achieves, against the data it took and against the time it took.",
    (
        _success(
            "Success by env steps", "The band is the 95 % interval of the held-out episodes.", *_SUCCESS, x=m.ENV_STEPS
        ),
        _success("Success by training time", "The same against the wall clock of training.", *_SUCCESS, x=m.ELAPSED_S),
        _success("Success at the end", "Not only reached, but still so at the end of the episode.", *_AT_END),
        _noisy(
            "Return",
            "Sum of an episode's rewards.",
            *(_evaluated(m.EVALUATED_RETURN), _training(m.ROLLOUT_RETURN)),
            together=True,
        ),
        _noisy(
            "Episode length",
            "In env steps; where success ends an episode, shorter is better.",
            *(_evaluated(m.EVALUATED_LENGTH), _training(m.ROLLOUT_LENGTH)),
            together=True,
        ),
        HeatMap("Success by task", "Of the held-out episodes.", m.SUCCESS_ONCE, "task", source="evaluations"),
        _noisy(
            "Imitation error",
            "How far the policy is from what was demonstrated.",
            Series(m.SFT_SQUARED_ERROR, "squared error"),
            Series(m.SFT_NLL, "negative log-likelihood"),
            Series(m.SFT_FLOW_MATCHING, "flow matching"),
        ),
    ),
)

SPEED = Section(
    "speed",
    "Speed",
    "How fast data is made and trained on, and who waits for whom.",
    (
        _noisy(
            "Throughput",
            "Env steps trained on per second of wall clock.",
            Series(m.ENV_STEPS_PER_S, "env steps/s"),
            unit="rate",
        ),
        Lines(
            "Who is busy",
            "Shares of the time. Who is near 100 % sets the pace; the others wait.",
            Series(m.WORKER_IDLE, "env workers", complement=True),
            Series(m.REPLICA_IDLE, "replicas", complement=True),
            Series(m.TRAINER_IDLE, "trainer", complement=True),
            unit="share",
            whole=True,
        ),
        Lines(
            "Time of an update",
            "Waiting is time in which the trainer had nothing to train on.",
            Series(m.UPDATE_S, "whole update"),
            Series(m.ROLLOUT_S, "rollout"),
            Series(m.TRAIN_S, "training"),
            Series(m.WAIT_S, "waiting"),
            Series(m.LAST_ARRIVAL_TO_STEP_S, "last arrival to step"),
            Series(m.PUBLISH_S, "publishing weights"),
            unit="seconds",
        ),
        _noisy(
            "Decisions and samples",
            "Per second: policy calls that were trained on; and the same, where each epoch counts.",
            Series(m.DECISIONS_PER_S, "decisions/s"),
            Series(m.SAMPLES_PER_S, "samples/s"),
            unit="rate",
        ),
        Lines(
            "Env workers without a slot",
            "Share of their time without a free slot to write into: the trainer is behind.",
            Series(m.WORKER_NO_SLOT, "without a slot"),
            unit="share",
            whole=True,
        ),
    ),
)

STALENESS = Section(
    "staleness",
    "Staleness",
    "How many updates old the data was when it was trained on.",
    (
        HeatMap(
            "Staleness over the run",
            "The stronger the colour, the more of an update's trajectories had that age.",
            m.STALENESS_SHARE,
            "age",
            (Series(m.STALENESS_MEAN, "mean"), Series(m.STALENESS_BOUND, "bound η")),
        ),
        Lines(
            "Mean, largest and bound",
            "The largest stays at or below the bound η.",
            Series(m.STALENESS_MEAN, "mean"),
            Series(m.STALENESS_MAX, "largest"),
            Series(m.STALENESS_BOUND, "bound η"),
            unit="updates",
            together=True,
        ),
    ),
)

BATCHES = Section(
    "batches",
    "Batches and queue",
    "How requests for actions are batched, and how trajectories wait to be trained on.",
    (
        HeatMap(
            "Batch sizes over the run",
            "The stronger the colour, the more of the batches had that many rows.",
            m.BATCH_SHARE,
            "rows",
            (Series(m.BATCH_MEAN, "mean"), Series(m.BATCH_LIMIT, "limit Bmax")),
            doubling=True,
        ),
        Lines(
            "Rows of a batch", "On average, and at most.", Series(m.BATCH_MEAN, "mean"), Series(m.BATCH_LIMIT, "limit Bmax")
        ),
        Lines(
            "Wait of a request",
            "How long a decision waited for its batch to begin.",
            Series(m.REQUEST_WAIT_P50, "median"),
            Series(m.REQUEST_WAIT_P95, "95th percentile"),
            Series(m.REQUEST_WAIT_P99, "99th percentile"),
            unit="seconds",
        ),
        Lines(
            "Forward pass",
            "How long a replica took for a batch.",
            Series(m.FORWARD_P50, "median"),
            Series(m.FORWARD_P95, "95th percentile"),
            unit="seconds",
        ),
        Lines(
            "Queue",
            "Finished trajectories at the end of an update.",
            Series(m.IN_FLIGHT, "not trained on yet"),
            Series(m.WAITING, "not handed out yet"),
        ),
        Lines(
            "Slots in use",
            "Share of the slots that are written into, wait, or are trained on.",
            Series(m.OCCUPIED, "in use"),
            unit="share",
            whole=True,
        ),
        Lines(
            "Trajectories since the start",
            "What was finished and not trained on is in flight, or was dropped.",
            Series(m.PRODUCED, "finished"),
            Series(m.CONSUMED, "trained on"),
            Series(m.CUT, "cut"),
            Series(m.DROPPED, "dropped"),
        ),
    ),
)

DIAGNOSTICS = Section(
    "diagnostics",
    "Diagnostics",
    "Whether updates are of a healthy size, and what they rest on.",
    (
        _noisy("KL", "From the policy that the clip is centred on; jumps are too large steps.", Series(m.APPROX_KL, "KL")),
        _noisy("Clipped", "Share of the elements whose ratio is clipped.", Series(m.CLIP_FRACTION, "clipped"), unit="share"),
        _noisy("Entropy", "Of the policy; it falls as the policy becomes sure.", Series(m.ENTROPY, "entropy")),
        _noisy(
            "Explained variance",
            "What the critic foresees: 1 is all of it, 0 or less nothing.",
            Series(m.EXPLAINED_VARIANCE, "explained"),
        ),
        _noisy("Gradient norm", "Before clipping.", Series(m.GRAD_NORM, "norm")),
        _noisy("Log-prob gap", "From the policy that acted to the trainer's.", Series(m.LOG_PROB_GAP, "gap")),
        _noisy("Probability ratio", "1 where the policy has not moved.", Series(m.RATIO, "ratio")),
        _noisy("Capped weights", "Share of the corrections for age that met the cap.", Series(m.CAPPED_FRACTION, "capped")),
        _noisy("KL from the start", "From the policy that the run began with.", Series(m.REFERENCE_KL, "KL")),
        _noisy("Losses", "Of policy and critic.", Series(m.POLICY_LOSS, "policy"), Series(m.VALUE_LOSS, "critic")),
        Lines(
            "Groups",
            "Groups whose outcomes are all the same teach nothing.",
            Series(m.GROUPS, "all"),
            Series(m.EQUAL_GROUPS, "all the same"),
        ),
        Lines("Learning rate", "Of the first parameter group.", Series(m.LR, "learning rate")),
    ),
)

MEMORY = Section(
    "memory",
    "Memory",
    "What each role holds in the host's memory at the end of an update.",
    (
        Lines(
            "Memory by role",
            "Of the processes, without files and shared memory; and of the slab, which they share.",
            Series(m.WORKERS_MIB, "env workers"),
            Series(m.REPLICAS_MIB, "replicas"),
            Series(m.TRAINER_MIB, "trainer"),
            Series(m.SLAB_MIB, "slab"),
            unit="mib",
            stacked=True,
        ),
    ),
)

SECTIONS = (LEARNING, SPEED, STALENESS, BATCHES, DIAGNOSTICS, MEMORY)
