"""The live view: what it shows, in terminals of any size."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from vla_async.monitor.live import LiveState, render
from vla_async.monitor.metrics import SuccessRate

METRICS = {
    "worker/idle_share": 0.07,
    "replica/idle_share": 0.88,
    "trainer/idle_share": 0.2,
    "worker/no_slot_share": 0.05,
    "staleness/mean": 0.42,
    "staleness/max": 1.0,
    "staleness/bound": 1.0,
    "staleness/share_0": 0.58,
    "staleness/share_1": 0.42,
    "queue/waiting": 3.0,
    "queue/occupied_share": 0.75,
    "queue/slots": 16.0,
    "queue/dropped/stale": 2.0,
    "queue/dropped/resume": 1.0,
    "queue/cut": 0.0,
    "time/env_steps_per_s": 1034.4,
    "time/decisions_per_s": 258.1,
    "time/update_s": 3.21,
    "time/wait_s": 0.64,
    "ppo/approx_kl": 0.0134,
    "ppo/clip_fraction": 0.11,
    "ppo/entropy": 1.204,
    "ppo/explained_variance": 0.74,
    "train/grad_norm": 0.412,
    "rollout/success_once": 0.78,
}
FULL = LiveState(
    counts=("step 62/100", "env steps 12,400/20,000"),
    elapsed_s=187.0,
    share=0.629,
    remaining_s=115.0,
    title="toy_ppo · fit · StreamingFitLoop",
    place="runs/toy_ppo/2026-01-31_12-00-00",
    metrics=METRICS,
    validated=[SuccessRate(n, 50) for n in (4, 6, 20, 41)],
    curves={"rollout/success_once": [n / 62 for n in range(62)]},
    note="validating step 60: 12/50 episodes",
    warnings=["update 40: staleness/mean=1.2 is above 1", "update 58: " + "too long for any terminal " * 20],
    num_warnings=5,
)


def shown(state: LiveState, width: int = 120, height: int = 40) -> list[str]:
    """The lines of a view."""
    console = Console(file=io.StringIO(), record=True, width=width, height=height)
    console.print(render(state, width, height))
    return console.export_text().splitlines()


def test_everything_that_is_known_is_shown():
    text = "\n".join(shown(FULL))
    for part in (
        *("toy_ppo · fit · StreamingFitLoop", "runs/toy_ppo/2026-01-31_12-00-00"),
        *("step 62/100 · env steps 12,400/20,000 · elapsed 3:07 · about 1:55 left", " 62 %"),
        *("0.82 [0.69, 0.90] n=50", "0.78", "validating step 60: 12/50 episodes"),
        *("93% busy", "12% busy", "80% busy", "last update"),
        *("mean 0.42 · max 1 of 1 · ages 0 ▅▄ 1", "12 of 16 taken", "3 waiting · 3 dropped · envs without slot 5%"),
        *("1,034 env steps/s · 258 decisions/s", "took 3.2 s · waited 640 ms"),
        *("KL 0.013 · clipped 11% · entropy 1.2", "explained variance 0.74 · grad norm 0.41"),
        *("5 warnings", "! update 40: staleness/mean=1.2 is above 1", "! update 58: too long"),
    ):
        assert part in text
    assert "cut" not in text, "nothing was"


@pytest.mark.parametrize("state", [FULL, dataclasses.replace(FULL, warnings=(), title=""), LiveState(("step 3",), 1.0)])
@pytest.mark.parametrize(
    ("width", "height"), [(240, 60), (120, 40), (100, 24), (81, 18), (79, 40), (78, 40), (60, 12), (40, 5), (24, 2), (8, 1)]
)
def test_no_line_is_wider_and_no_view_higher_than_the_terminal(state, width, height):
    """A line more would scroll, a column more would wrap: the next drawing would then begin in the wrong place."""
    lines = shown(state, width, height)
    assert 1 <= len(lines) <= max(1, height - 1)
    assert max(map(cell_len, lines)) <= width


def test_boxes_need_a_wide_and_high_terminal():
    assert any("╭" in line for line in shown(FULL, 79, 40))
    assert not any("╭" in line for line in shown(FULL, 78, 40))
    assert not any("╭" in line for line in shown(FULL, 120, 12))


def test_a_low_terminal_shows_what_matters_most_and_a_higher_one_more():
    assert shown(FULL, 120, 2) == ["step 62/100 · env steps 12,400/20,000 · elapsed 3:07 · about 1:55 left"]
    assert " 62 %" in shown(FULL, 120, 3)[1]
    lines = shown(FULL, 120, 7)
    assert lines[0].startswith("toy_ppo")
    assert lines[3].startswith("validated")
    assert not any("busy" in line for line in lines)
    assert any("busy" in line for line in shown(FULL, 120, 12))


@pytest.mark.parametrize("width", [120, 60])
def test_what_is_not_known_leaves_no_empty_place(width):
    assert shown(LiveState(("episodes 3/10",), 61.0), width) == ["episodes 3/10 · elapsed 1:01"]


def test_a_loop_without_replicas_or_queue_shows_none():
    """The synchronous loop has neither."""
    metrics = {"worker/idle_share": 0.5, "trainer/idle_share": 0.5, "time/rollout_s": 2.0, "time/train_s": 1.0}
    text = "\n".join(shown(dataclasses.replace(FULL, metrics=metrics, curves={}, validated=(), note="", warnings=())))
    assert "env workers" in text
    assert "rollout 2.0 s · training 1.0 s" in text
    for missing in (
        "replicas",
        "staleness",
        "slots",
        "queue",
        "learning  ",
        "validated",
        "training   ",
        "─ success",
        "─ data",
    ):
        assert missing not in text


def test_a_metric_that_is_no_number_is_left_out():
    text = "\n".join(shown(dataclasses.replace(FULL, metrics=METRICS | {"replica/idle_share": math.nan})))
    assert "replicas" not in text
    assert "nan" not in text


def test_shares_of_a_bound_that_was_lowered_are_not_shown_any_more():
    """``staleness/share_2`` stays known from the updates before, but nothing is that old now."""
    metrics = METRICS | {"staleness/share_2": 0.9}
    assert shown(dataclasses.replace(FULL, metrics=metrics)) == shown(FULL)


def test_an_update_that_runs_is_told_apart_from_the_last_one():
    text = "\n".join(shown(dataclasses.replace(FULL, so_far=True)))
    assert "this update so far" in text
    assert "so far 3.2 s" in text
    assert "last update" not in text


def test_losses_are_drawn_between_their_lowest_and_their_highest_value():
    curve = {"sft/squared_error": [4.0, 3.0, 2.0, 1.0]}
    state = LiveState(("step 4/8",), 1.0, 0.5, metrics={"sft/squared_error": 1.0}, curves=curve)
    [line] = [line for line in shown(state) if "squared error" in line]
    assert "█▆▃▁" in line
    assert line.rstrip("│ ").endswith(" 1")


def test_without_colours_the_view_reads_the_same():
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True, no_color=True, color_system="truecolor")
    console.print(render(FULL, 120, 40))
    drawn = console.file.getvalue()
    assert not any(f"[{code}m" in drawn for code in range(30, 38))
    assert "━" in drawn
    assert "─" in drawn


def test_what_is_done_is_not_rounded_up_to_all():
    assert " 99 %" in "\n".join(shown(dataclasses.replace(FULL, share=0.9999)))
    assert " 29 %" in "\n".join(shown(dataclasses.replace(FULL, share=0.29)))  # 28.999... in binary
    assert "100 %" in "\n".join(shown(dataclasses.replace(FULL, share=1.0)))
