"""Findings about what is learned: whether there is anything to learn from, and what became of success."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vla_async.monitor.metric_table import (
    ENTROPY,
    ENV_STEPS,
    EQUAL_GROUPS,
    EVALUATED_EPISODES,
    EXPLAINED_VARIANCE,
    GRAD_NORM,
    GROUPS,
    LOSS,
    ROLLOUT_EPISODES,
    ROLLOUT_RETURN,
    ROLLOUT_SUCCESS_ONCE,
    SUCCESS_ONCE,
    SUCCESS_ONCE_HIGH,
    SUCCESS_ONCE_LOW,
)
from vla_async.monitor.metrics import mean, wilson_interval
from vla_async.report.findings_base import (
    OBJECTIVES,
    Finding,
    inside,
    learns,
    named,
    of_objective,
    percent,
    settled,
    values,
)
from vla_async.report.run_data import Line, RunData

SAME = 1e-9  # outcomes nearer than this differ by rounding
FEW = 3  # updates whose outcomes may be the same by chance
ALL_EQUAL, MANY_EQUAL = 0.9, 0.5  # of the groups: hardly anything, or half of the simulators' time, is left to learn from
NEVER = 30  # episodes without a success: the rate is then below 11 % (95 %)
DEAD = 0.5  # of the updates without a gradient
COLLAPSED = 0.1  # of the entropy at first
SOLVED = 0.9  # a policy that succeeds so often may well be sure of itself
CRITIC_UPDATES = 8  # before which a critic need not know anything
WIDE = 0.3  # width of an interval: a policy that became half as good again may not be told from the old one


def no_signal(run: RunData) -> Iterator[Finding]:
    """Outcomes that are all the same."""
    lines = settled(run)
    groups, equal = sum(of_objective(lines, GROUPS)), sum(of_objective(lines, EQUAL_GROUPS))
    if groups > 0.0 and equal >= MANY_EQUAL * groups:
        text = (
            f"{percent(equal / groups)} of the groups had equal outcomes, which is no signal to learn from: tasks that are "
            "neither always solved nor never, a dense reward (objective.outcome=return), or more episodes per group "
            f"({inside(run, 'objective.group_size')}) would make differences."
        )
        rule = f"{EQUAL_GROUPS} >= {percent(MANY_EQUAL)} of {GROUPS} (a problem from {percent(ALL_EQUAL)} on)"
        yield Finding("problem" if equal >= ALL_EQUAL * groups else "note", text, rule)
        return
    ended = [line for line in run.updates if ROLLOUT_RETURN.of() in line]
    returns, success = values(ended, ROLLOUT_RETURN.of()), values(ended, ROLLOUT_SUCCESS_ONCE.of())
    episodes = sum(values(ended, ROLLOUT_EPISODES.of()))
    if min(len(returns), len(success)) < FEW:
        return
    if max(returns) - min(returns) <= SAME and max(success) - min(success) <= SAME:
        done = " Nothing is left to learn here." if success[0] >= 1.0 else ""
        fix = (
            done
            or " A dense reward, an easier task or a policy that has imitated demonstrations (vla-async sft) would help."
        )
        text = f"Success ({success[0]:.2f}) and return ({returns[0]:.3g}) were the same in all updates: no signal.{fix}"
        yield Finding("note" if done else "problem", text, f"no change of return and success in {FEW} updates or more")
    elif max(success) == 0.0 and episodes >= NEVER:
        quarter = max(1, len(returns) // 4)
        before, after = mean(returns[:quarter]), mean(returns[-quarter:])
        text = (
            f"None of {episodes:,.0f} training episodes succeeded; the mean return went from {before:.3g} to {after:.3g}. "
            "Where that does not rise, a denser reward, an easier task, or a policy that has imitated demonstrations "
            "(vla-async sft) would give a signal."
        )
        rule = (
            f"no success in {NEVER} episodes or more (a problem unless the return rose from the first to the last quarter)"
        )
        yield Finding("note" if after > before else "problem", text, rule)


def gradients(run: RunData) -> Iterator[Finding]:
    """Gradients and losses that are no numbers, or nothing."""
    names = [GRAD_NORM, *(LOSS.of(name) for name in OBJECTIVES)]
    broken = [line for line in run.updates if any(not math.isfinite(line[name]) for name in names if name in line)]
    if broken:
        text = (
            f"The gradient or the loss was no finite number in {len(broken)} of {len(run.updates)} updates: what is "
            f"learned is lost. Lower the learning rate ({inside(run, 'model.lr')}), set fit_loop.max_grad_norm, or use "
            "trainer.precision=32-true; then start again from a checkpoint that is older."
        )
        yield Finding("problem", text, f"{GRAD_NORM} or {LOSS} is not finite in an update")
    norms = values(run.updates, GRAD_NORM)
    dead = sum(norm == 0.0 for norm in norms)
    if norms and dead >= DEAD * len(norms):
        text = (
            f"The gradient was 0 in {dead} of {len(norms)} updates: nothing changes. Look whether all of the policy is "
            "frozen (model.freeze), or all advantages are 0."
        )
        yield Finding("problem", text, f"{GRAD_NORM} = 0 in {percent(DEAD)} of the updates or more")


def entropy(run: RunData) -> Iterator[Finding]:
    """A policy that stopped exploring before it had learned the task."""
    found = of_objective(run.updates, ENTROPY)
    quarter = len(found) // 4
    if not quarter or min(found) < 0.0:  # of a density, it may be any number
        return
    before, after = mean(found[:quarter]), mean(found[-quarter:])
    success = values(run.updates[-quarter:], ROLLOUT_SUCCESS_ONCE.of())
    if after <= COLLAPSED * before and before > 0.0 and not mean(success) >= SOLVED:
        text = (
            f"The policy's entropy fell from {before:.3g} to {after:.3g} nats: it hardly explores any more. Raise "
            f"{named(run, 'objective.entropy_coef')}, or lower the learning rate ({inside(run, 'model.lr')})."
        )
        rule = (
            f"{ENTROPY} of the last quarter <= {percent(COLLAPSED)} of the first's, never negative, and success below "
            f"{percent(SOLVED)} (a note if success rises)"
        )
        yield Finding("note" if learns(run) else "problem", text, rule)


def critic(run: RunData) -> Iterator[Finding]:
    """A critic that foresees nothing."""
    found = of_objective(run.updates, EXPLAINED_VARIANCE)
    later = found[len(found) // 2 :]
    if len(found) >= CRITIC_UPDATES and sum(value <= 0.0 for value in later) >= len(later) / 2:
        text = (
            f"The critic explains nothing of the returns (explained variance {mean(later):.2g} in the second half), "
            f"so advantages are mostly noise. {named(run, 'objective.critic_warmup_updates')} trains it first; "
            f"{named(run, 'objective.value_coef')} and {named(run, 'fit_loop.update_epochs')} make it learn faster."
        )
        rule = f"{EXPLAINED_VARIANCE} <= 0 in half of the last half, from {CRITIC_UPDATES} on (a note if success rises)"
        yield Finding("note" if learns(run) else "problem", text, rule)


@dataclass(frozen=True)
class Rate:
    """A validation's success rate with its 95 % interval, and the env steps before it."""

    rate: float
    low: float
    high: float
    episodes: float
    env_steps: float

    @classmethod
    def of(cls, line: Line, *task: str) -> Rate:
        """That of one line of metrics.csv."""
        rate, n = line[SUCCESS_ONCE.of("validate", *task)], line.get(EVALUATED_EPISODES.of("validate", *task), math.nan)
        low = line.get(SUCCESS_ONCE_LOW.of("validate", *task), math.nan)
        high = line.get(SUCCESS_ONCE_HIGH.of("validate", *task), math.nan)
        if math.isnan(low + high) and n >= 1.0:
            low, high = wilson_interval(round(rate * n), round(n))
        return cls(rate, low, high, n, line.get(ENV_STEPS, 0.0))

    def __str__(self) -> str:
        return f"{self.rate:.2f} [{self.low:.2f}, {self.high:.2f}]"


def success(run: RunData) -> Iterator[Finding]:
    """What validations say about success, of all tasks and of each."""
    names = dict.fromkeys(name for line in run.evaluations for name in line)
    labels = [found for name in names if (found := SUCCESS_ONCE.labels_of(name)) and found["split"] == "validate"]
    for task in sorted(label["task"] for label in labels):
        parts = (task,) if task else ()
        name = SUCCESS_ONCE.of("validate", *parts)
        rates = [Rate.of(line, *parts) for line in run.evaluations if math.isfinite(line.get(name, math.nan))]
        if len(rates) >= 2:
            yield from _change(run, rates, f" in {task}" if task else "")


def _change(run: RunData, rates: list[Rate], where: str) -> Iterator[Finding]:
    first, last, best = rates[0], rates[-1], max(rates, key=lambda rate: rate.rate)
    if last.high < best.low:
        text = (
            f"Success{where} went backwards: from {best} after {best.env_steps:,.0f} env steps to {last} at the end. "
            "checkpoints/best.ckpt has the better weights (--trainer.init_from best); a lower learning rate "
            f"({inside(run, 'model.lr')}) or {named(run, 'objective.target_kl')} may keep them."
        )
        yield Finding("problem", text, "the last validation's interval lies below the best one's")
    if first.high < last.low:
        text = f"Success{where} improved from {first} to {last}, after {last.env_steps:,.0f} env steps."
        yield Finding("good", text, "the last validation's interval lies above the first one's")
    elif not where and last.high - last.low >= WIDE:
        enough = math.ceil((2 * 1.96 / WIDE) ** 2 / 4 / 10) * 10  # width 2 z sqrt(p (1 - p) / n) at p = 1/2
        text = (
            f"The last validation says {last} from {last.episodes:.0f} episodes, too few to tell policies apart: "
            f"{named(run, 'evaluate_loop.num_episodes')} of more than {enough} in all makes the interval narrower."
        )
        yield Finding(
            "note", text, f"the 95 % interval of the last validation is {WIDE:g} wide or wider, and not above the first"
        )


LEARNING_RULES = (no_signal, gradients, entropy, critic, success)
