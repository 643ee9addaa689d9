"""Findings about machinery, age and learning: each rule fires at its threshold, and not beside it."""

from __future__ import annotations

import math

import pytest

from tests.report.findings_fakes import Values, kind, make_run
from vla_async.report import findings_age as age
from vla_async.report import findings_learning as learning
from vla_async.report import findings_machinery as machinery
from vla_async.report.run_data import Line

NAN = math.nan

# ---------------------------------------------------------------------------------------------- machinery


def test_restarts() -> None:
    assert kind(machinery.restarts, {"worker/restarts": 0.0}) is None
    assert kind(machinery.restarts, {"worker/restarts": [0.0] * 19 + [1.0]}) == "problem"


@pytest.mark.parametrize(("number", "expected"), [(0.0, None), (4.0, "note"), (5.0, "problem")])
def test_dropped_trajectories_by_their_share(number: float, expected: str | None) -> None:
    assert kind(machinery.dropped, {"queue/produced": 100.0, "queue/dropped/resume": number}) == expected


def test_dropped_trajectories_are_told_by_reason() -> None:
    metrics: dict[str, Values] = {"queue/produced": 100.0, "queue/dropped/resume": 9.0, "queue/dropped/own reason": 2.0}
    first, second = machinery.dropped(make_run(metrics))
    assert "9 of 100 trajectories (9 %)" in first.text
    assert "fit_loop.in_flight=save" in first.text
    assert second.text.endswith("“own reason”.")


def test_cut_trajectories() -> None:
    assert kind(machinery.cut, {"queue/produced": 100.0, "queue/cut": 25.0}) == "note"
    assert kind(machinery.cut, {"queue/produced": 100.0, "queue/cut": 24.0}) is None


RISING = [1000.0 + 10.0 * update for update in range(40)]  # by 290 MiB after the warm-up


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (RISING, "problem"),
        ([value / 10 for value in RISING], None),  # by 29 MiB
        ([10_000.0 + value for value in RISING], None),  # by less than a tenth
        ([min(value, 1250.0) for value in RISING], None),  # a cache that is full
        ([1300.0 if update % 2 else 1000.0 for update in range(40)], None),
        ([1000.0] * 40, None),
    ],
    ids=["leak", "small", "little", "cache", "jumpy", "flat"],
)
def test_memory_that_goes_on_growing(used: list[float], expected: str | None) -> None:
    assert kind(machinery.memory, {"memory/workers_mib": used}, number=40) == expected
    assert kind(machinery.memory, {"memory/workers_mib": used[:20]}) is None, "too short to tell a leak from a start"


# ---------------------------------------------------------------------------------------------- age


STALE = {"staleness/mean": 3.5, "staleness/bound": 4.0, "staleness/max": 4.0, "ppo/log_prob_gap": 0.05}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "problem"),
        ({"staleness/mean": 3.1}, "note"),
        ({"staleness/mean": 3.1, "ppo/log_prob_gap": 0.2}, "problem"),
        ({"staleness/mean": 3.1, "ppo/clip_fraction": 0.31}, "problem"),
        ({"staleness/mean": 1.0, "staleness/bound": 1.0}, None),
        ({"ppo/importance_weight": 1.0}, None),
        ({"ppo/importance_weight": 1.0, "ppo/log_prob_gap": 0.3}, "problem"),
        ({"staleness/mean": NAN}, None),
    ],
)
def test_stale_data(change: dict[str, Values], expected: str | None) -> None:
    """η = 1 is what overlap costs; more of it needs a correction, and shows in the log-probs."""
    assert kind(age.stale, STALE | change) == expected


def test_log_probs_of_fresh_data_have_to_agree() -> None:
    assert kind(age.mismatch, {"staleness/max": 0.0, "ppo/log_prob_gap": 0.02}) == "problem"
    assert kind(age.mismatch, {"staleness/max": 0.0, "ppo/log_prob_gap": 0.01}) is None
    assert kind(age.mismatch, {"staleness/max": 1.0, "ppo/log_prob_gap": 0.5}) is None


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"grpo/approx_kl": [0.0] * 18 + [0.2] * 2}, "problem"),
        ({"grpo/approx_kl": [0.0] * 19 + [9.0]}, None),
        ({"grpo/approx_kl": 0.19}, None),
        ({"ppo/ratio": [1.0] * 18 + [1.6] * 2}, "problem"),
        ({"ppo/ratio": [1.0] * 18 + [0.5] * 2}, "problem"),
        ({"ppo/ratio": 1.4}, None),
    ],
)
def test_updates_that_move_the_policy_too_far(metrics: dict[str, Values], expected: str | None) -> None:
    assert kind(age.explosion, metrics) == expected


# ---------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(("equal", "expected"), [(9.0, "problem"), (8.0, "note"), (5.0, "note"), (4.0, None)])
def test_groups_with_equal_outcomes(equal: float, expected: str | None) -> None:
    assert kind(learning.no_signal, {"grpo/groups": 10.0, "grpo/equal_groups": equal}) == expected


def outcomes(success: Values, returns: Values, episodes: float = 4.0) -> dict[str, Values]:
    return {"rollout/success_once": success, "rollout/return": returns, "rollout/episodes": episodes}


RISE, FALL = [float(update) for update in range(20)], [-float(update) for update in range(20)]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (outcomes(0.0, 5.0), "problem"),
        (outcomes(1.0, 5.0), "note"),  # nothing is left to learn
        (outcomes(0.0, RISE), "note"),
        (outcomes(0.0, FALL), "problem"),
        (outcomes(0.0, FALL, episodes=1.0), None),  # 20 episodes say little
        (outcomes([0.0] * 19 + [0.1], FALL), None),
        ({}, None),
    ],
)
def test_outcomes_that_are_all_the_same(metrics: dict[str, Values], expected: str | None) -> None:
    assert kind(learning.no_signal, metrics) == expected
    assert kind(learning.no_signal, metrics, number=2) is None


def test_gradients() -> None:
    assert kind(learning.gradients, {"train/grad_norm": 1.0, "ppo/loss": 0.0}) is None
    assert kind(learning.gradients, {"train/grad_norm": [1.0] * 19 + [NAN]}) == "problem"
    assert kind(learning.gradients, {"grpo/loss": [1.0] * 19 + [math.inf]}) == "problem"
    assert kind(learning.gradients, {"train/grad_norm": [0.0] * 10 + [1.0] * 10}) == "problem"
    assert kind(learning.gradients, {"train/grad_norm": [0.0] * 9 + [1.0] * 11}) is None


def test_entropy_that_collapses_before_the_task_is_learned() -> None:
    fell: dict[str, Values] = {"ppo/entropy": [2.0] * 15 + [0.2] * 5}
    assert kind(learning.entropy, fell) == "problem"
    assert kind(learning.entropy, {"ppo/entropy": [2.0] * 15 + [0.21] * 5}) is None
    assert kind(learning.entropy, fell | {"rollout/success_once": 0.95}) is None
    assert kind(learning.entropy, {"ppo/entropy": [2.0] * 15 + [0.1] * 4 + [-0.1]}) is None, "of a density, it means little"
    rises: dict[str, Values] = {"rollout/success_once": [0.1] * 15 + [0.31] * 5}
    assert kind(learning.entropy, fell | rises) == "note", "it does no harm while success rises"


def test_a_critic_that_foresees_nothing() -> None:
    assert kind(learning.critic, {"ppo/explained_variance": [0.5] * 15 + [-0.1] * 5}) == "problem"
    assert kind(learning.critic, {"ppo/explained_variance": [-0.5] * 16 + [0.1] * 4}) == "problem"
    assert kind(learning.critic, {"ppo/explained_variance": [-0.5] * 14 + [0.1] * 6}) is None
    assert kind(learning.critic, {"ppo/explained_variance": -0.1}, number=7) is None


def test_what_looks_odd_is_a_note_while_success_rises() -> None:
    """A remedy for what does no harm may do some."""
    odd: dict[str, Values] = {"ppo/explained_variance": -0.1, "ppo/approx_kl": 0.3}
    for last, expected in ((0.19, "problem"), (0.21, "note")):
        evaluations = [evaluation(0.0), evaluation(last)]
        assert kind(learning.critic, odd, evaluations=evaluations) == expected
        assert kind(age.explosion, odd, evaluations=evaluations) == expected


def evaluation(rate: float, n: int = 100, env_steps: float = 0.0, task: str = "") -> Line:
    end = f"/{task}" if task else ""
    return {f"validate/success_once{end}": rate, f"validate/episodes{end}": float(n), "env_steps": env_steps}


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        ([evaluation(0.2), evaluation(0.5, env_steps=900.0)], ["good"]),
        ([evaluation(0.2), evaluation(0.3)], []),
        ([evaluation(0.2), evaluation(0.8), evaluation(0.5)], ["problem", "good"]),
        ([evaluation(0.8), evaluation(0.5)], ["problem"]),
        ([evaluation(0.8), evaluation(0.7)], []),
        ([evaluation(0.2, n=20), evaluation(0.5, n=20)], ["note"]),
        ([evaluation(0.5, n=10)], []),
        ([], []),
    ],
)
def test_success_is_judged_by_its_intervals(evaluations: list[Line], expected: list[str]) -> None:
    found = list(learning.success(make_run({}, evaluations=evaluations)))
    assert [finding.kind for finding in found] == expected


def test_success_is_judged_for_each_task() -> None:
    lines = [evaluation(0.5) | evaluation(0.9, task="a") | evaluation(0.1, task="b/c") for _ in range(2)]
    lines[1] |= evaluation(0.1, task="a") | evaluation(0.9, task="b/c")
    found = list(learning.success(make_run({}, evaluations=lines)))
    assert [(finding.kind, finding.text.partition(":")[0].partition(" from")[0]) for finding in found] == [
        ("problem", "Success in a went backwards"),
        ("good", "Success in b/c improved"),
    ]
