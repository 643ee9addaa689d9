"""Findings about the age of the data, and about how far the policy is from the one that acted."""

from __future__ import annotations

from collections.abc import Iterator

from vla_async.monitor.metric_table import (
    APPROX_KL,
    CLIP_FRACTION,
    IMPORTANCE_WEIGHT,
    LOG_PROB_GAP,
    RATIO,
    STALENESS_BOUND,
    STALENESS_MAX,
    STALENESS_MEAN,
)
from vla_async.monitor.metrics import mean
from vla_async.report.findings_base import Finding, Kind, inside, learns, named, of_objective, percent, settled, values
from vla_async.report.run_data import RunData

OLD = 1.0  # updates: with η = 1, which every overlap needs, the mean cannot be above it
NEAR_BOUND = 0.8  # of the bound: hardly anything is fresh
FAR = 0.2  # nats, by which a probability ratio leaves the usual clip range of 0.2 before the first step is made
CLIPPED = 0.3  # of the elements: as many are not trained on; up to a fifth is usual
SAME = 0.02  # nats: a gap that rounding in bfloat16 leaves is smaller
LARGE_KL = 0.2  # nats, ten times what target_kl usually is
RATIO_RANGE = (0.67, 1.5)  # of its mean, which is 1 for a policy that has not moved
OFTEN = 0.1  # of the updates: more than an accident


def stale(run: RunData) -> Iterator[Finding]:
    """Old data that nothing corrects for, or whose age does harm."""
    lines = settled(run)
    age, bound = mean(values(lines, STALENESS_MEAN)), mean(values(lines, STALENESS_BOUND))
    if not age > OLD:
        return
    gap, clipped = mean(of_objective(lines, LOG_PROB_GAP)), mean(of_objective(lines, CLIP_FRACTION))
    corrected = bool(of_objective(lines, IMPORTANCE_WEIGHT))
    harm = gap >= FAR or clipped >= CLIPPED
    if corrected and not harm:
        return
    kind: Kind = "problem" if harm or age >= NEAR_BOUND * bound else "note"
    signs = [f"the policies that acted and are trained differ by {gap:.2g} nats"] if gap == gap else []
    signs += [f"{percent(clipped)} of the elements are clipped"] if clipped == clipped else []
    fixes = f"Lower {named(run, 'fit_loop.max_staleness')}"
    if not corrected:
        fixes += ", or set objective.correction, for example decoupled, which takes account of the age"
    elif harm:
        fixes += f", or the learning rate ({inside(run, 'model.lr')})"
    told = f" ({'; '.join(signs)})" if signs else ""
    text = f"The data is stale: {age:.1f} updates old on average, of at most {bound:.0f}{told}. {fixes}."
    rule = (
        f"{STALENESS_MEAN} > {OLD:g} without objective.correction, or with it where {LOG_PROB_GAP} >= {FAR:g} or "
        f"{CLIP_FRACTION} >= {percent(CLIPPED)}; a problem with one of these, or from {percent(NEAR_BOUND)} of "
        f"{STALENESS_BOUND} on"
    )
    yield Finding(kind, text, rule)


def mismatch(run: RunData) -> Iterator[Finding]:
    """Rollout and training that compute different log-probs from the same weights."""
    lines = [line for line in settled(run) if line.get(STALENESS_MAX) == 0.0]
    gap = mean(of_objective(lines, LOG_PROB_GAP))
    if gap >= SAME:
        text = (
            f"With data of the newest weights, the log-probs of rollout and training differ by {gap:.2g} nats: the two "
            "compute differently. trainer.precision=32-true shows whether that is rounding; else evaluate() of the policy "
            "does not repeat what act() did, for example for dropout or a changed input."
        )
        yield Finding("problem", text, f"{LOG_PROB_GAP} >= {SAME:g} in updates with {STALENESS_MAX} = 0")


def explosion(run: RunData) -> Iterator[Finding]:
    """Updates that move the policy too far."""
    low, high = RATIO_RANGE
    kls, ratios = of_objective(run.updates, APPROX_KL), of_objective(run.updates, RATIO)
    far = [kl for kl in kls if kl >= LARGE_KL]
    off = [ratio for ratio in ratios if not low <= ratio <= high]
    fix = (
        f"a lower learning rate ({inside(run, 'model.lr')}), fewer passes ({inside(run, 'fit_loop.update_epochs')}) or "
        f"{named(run, 'objective.target_kl')}, which ends an update early, would keep it nearer."
    )
    rule = (
        f"{APPROX_KL} >= {LARGE_KL:g}, or {RATIO} outside [{low:g}, {high:g}], in {percent(OFTEN)} of the updates or more, "
        "and in at least 2 (a note if success rises)"
    )
    if len(far) >= max(2.0, OFTEN * len(kls)):
        text = f"In {len(far)} of {len(kls)} updates the policy moved far (KL up to {max(far):.2g}): {fix}"
        yield Finding("note" if learns(run) else "problem", text, rule)
    elif len(off) >= max(2.0, OFTEN * len(ratios)):
        worst = max(off, key=lambda ratio: max(ratio, 1.0 / max(ratio, 1e-9)))
        text = f"In {len(off)} of {len(ratios)} updates the mean probability ratio was far from 1 ({worst:.2g}): {fix}"
        yield Finding("note" if learns(run) else "problem", text, rule)


AGE_RULES = (stale, mismatch, explosion)
