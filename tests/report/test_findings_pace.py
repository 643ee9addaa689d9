"""Findings about who waits for whom: each rule fires at its threshold, and not beside it."""

from __future__ import annotations

import math

import pytest

from tests.report.findings_fakes import Values, kind, make_run, one
from vla_async.report import findings_pace as pace
from vla_async.report.findings import find
from vla_async.report.findings_base import settled, share

NAN = math.nan


def shares(trainer: float, worker: float, no_slot: float = 0.0, replica: float = 0.5, **others: float) -> dict[str, Values]:
    names = {"trainer/idle_share": trainer, "worker/idle_share": worker, "worker/no_slot_share": no_slot}
    return {**names, "replica/idle_share": replica, "staleness/bound": 1.0, **others}


@pytest.mark.parametrize(
    ("metrics", "expected", "words"),
    [
        (shares(0.6, 0.05, replica=0.8), "problem", "the environments are the bottleneck"),
        (shares(0.2, 0.05), "note", "the environments are the bottleneck"),
        (shares(0.6, 0.9, replica=0.1), "problem", "the policy is the bottleneck"),
        (shares(0.6, 0.9, replica=0.54), "problem", "the policy is the bottleneck"),  # 46 % busy, of 90 % waiting
        (shares(0.6, 0.9, replica=0.56), "problem", "this interaction is the bottleneck"),
        (shares(0.6, 0.9, replica=NAN), "problem", "the policy is the bottleneck"),
        (shares(0.02, 0.8, no_slot=0.7), "problem", "the trainer is the bottleneck"),
        (shares(0.02, 0.8, no_slot=0.24), "good", "keep each other busy"),
        (shares(0.16, 0.5, no_slot=0.16), "problem", "too few slots"),
        (shares(0.16, 0.5, no_slot=0.14), "note", "the environments are the bottleneck"),
        (shares(0.14, 0.5, no_slot=0.3), "problem", "the trainer is the bottleneck"),
        (shares(0.3, 0.5, no_slot=0.4) | {"staleness/bound": 0.0}, "problem", "take turns. fit_loop.train_async=true"),
    ],
)
def test_the_bottleneck_is_who_keeps_the_others_waiting(metrics: dict[str, Values], expected: str, words: str) -> None:
    found = one(pace.bottleneck, make_run(metrics))
    assert found is not None
    assert (found.kind, words in found.text) == (expected, True), found.text


def test_too_few_slots_do_not_hide_who_is_next() -> None:
    """With slots enough, the trainer would wait 38 %: more slots alone are half of the remedy."""
    found = one(pace.bottleneck, make_run(shares(0.5, 0.3, no_slot=0.2)))
    assert found is not None
    assert "would still wait about 38 %" in found.text


def test_lockstep_is_named_where_it_is_the_cause() -> None:
    config = {"trainer": {"fit_loop": {"class_path": "x", "init_args": {"async_interaction": False}}}}
    found = one(pace.bottleneck, make_run(shares(0.6, 0.9, replica=0.9), config=config))
    assert found is not None
    assert "set fit_loop.async_interaction=true" in found.text


def test_the_warm_up_does_not_count_and_long_updates_count_for_more() -> None:
    """Processes that start look idle; and a share is one of the time, not of the updates."""
    metrics = shares(0.0, 0.1) | {
        "time/update_s": [1.0] * 16 + [12.0] * 4,
        "trainer/idle_share": [1.0] * 5 + [0.0] * 11 + [0.5] * 4,
    }
    lines = settled(make_run(metrics))
    assert len(lines) == 15
    assert share(lines, "trainer/idle_share") == pytest.approx(24 / 59)


def test_a_short_run_says_nothing_of_its_pace() -> None:
    found = find(make_run(shares(0.6, 0.05), number=3))
    assert [finding.kind for finding in found] == ["note"]
    assert "3 updates" in found[0].text
    assert kind(pace.too_short, shares(0.6, 0.05), number=4) is None
    assert "1 update," in find(make_run(shares(0.6, 0.05), number=1))[0].text
    assert kind(pace.too_short, {"sft/nll": 2.0}, number=1) is None


def test_turns_are_told_with_what_overlap_could_save() -> None:
    found = one(pace.turns, make_run({"time/rollout_s": 3.0, "time/train_s": 1.0}))
    assert found is not None
    assert found.kind == "note"
    assert "75 % of the time" in found.text
    assert "it would take 75 % of that" in found.text
    assert kind(pace.bottleneck, shares(0.6, 0.5) | {"time/rollout_s": 3.0, "time/train_s": 1.0}) is None


BATCHES = shares(0.5, 0.5) | {
    "batch_size/mean": 2.0,
    "batch_size/limit": 8.0,
    "request_wait_s/p50": 0.02,
    "forward_s/p50": 0.01,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "problem"),
        ({"batch_size/mean": 2.1}, None),
        ({"request_wait_s/p50": 0.009}, None),
        ({"worker/idle_share": 0.2}, None),
        ({"batch_size/mean": 1.0, "batch_size/limit": 1.0}, None),
        ({"batch_size/mean": NAN}, None),
    ],
)
def test_small_batches_matter_where_requests_wait_for_them(change: dict[str, Values], expected: str | None) -> None:
    assert kind(pace.batches, BATCHES | change) == expected


def test_waiting_for_a_batch_names_the_setting_that_makes_it_wait() -> None:
    config = {"trainer": {"fit_loop": {"init_args": {"max_wait_s": 0.05}}}}
    found = one(pace.batches, make_run(BATCHES, config=config))
    assert found is not None
    assert "lower fit_loop.max_wait_s (now 0.05), or set fit_loop.max_batch_size to about 2" in found.text


def test_a_wait_that_is_off_is_not_to_be_lowered() -> None:
    config = {"trainer": {"fit_loop": {"init_args": {"max_wait_s": 0.0, "envs_per_worker": 1}}}}
    found = one(pace.bottleneck, make_run(shares(0.6, 0.9, replica=0.9), config=config))
    assert found is not None
    assert "max_wait_s" not in found.text
    assert "raise fit_loop.envs_per_worker (now 1), or env.num_envs" in found.text


def test_publishing() -> None:
    assert kind(pace.publishing, {"time/publish_s": 0.1, "time/update_s": 1.0}) == "problem"
    assert kind(pace.publishing, {"time/publish_s": 0.09, "time/update_s": 1.0}) is None
    assert kind(pace.publishing, {"time/publish_s": 0.04, "time/update_s": 0.1}) is None
