"""The overlap benchmark: its cases cost what they say, its rows differ in what they name, and a case really runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import overlap
from benchmarks.overlap_cases import CHUNK, LIBERO, MANISKILL, RATIOS, ratio_case, recommended, rows
from vla_async.ablation import Row, ablation_rows
from vla_async.monitor.figures import median


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_ratio_costs_what_its_name_says(ratio: str) -> None:
    """In lockstep: one forward per decision and one for the ends, and every env step in between."""
    rollout_s, train_s = RATIOS[ratio]
    case = ratio_case(rollout_s, train_s)
    steps = case.decisions * CHUNK * case.step_s
    assert case.step_s > 0.0
    assert steps + (case.decisions + 1) * case.act_flat_s == pytest.approx(rollout_s)
    assert case.envs * case.decisions * case.train_per_decision_s == pytest.approx(train_s)
    named = [float(part) for part in ratio.split(":")]
    assert rollout_s / train_s == pytest.approx(named[0] / named[1])


def test_only_the_colocated_row_shares_devices_and_only_asynchronous_batches_are_cut() -> None:
    """What a row has beyond its switches would be taken for the switch's effect."""

    def extras(found: list[Row]) -> list[list[str]]:
        plain = {
            override
            for row in ablation_rows({"mode": "disaggregated", "rollout_devices": ["cpu"]})
            for override in row.overrides
        }
        return [[override for override in row.overrides if override not in plain] for row in found]

    colocated, two = ["--model.colocated=true"], ["--trainer.fit_loop.num_stages=2"]
    assert extras(rows(LIBERO)) == [colocated, [], [], [], []]
    assert extras(rows(MANISKILL)) == [colocated, [], [], two, two]
    assert [row.name for row in rows(MANISKILL)][-1] == "+ streamer, 2 stages"
    assert extras([recommended()]) == [[]]


def test_a_case_runs_and_takes_at_least_its_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe of the benchmark goes through the command line; nothing is faster than what is emulated."""
    case = replace(ratio_case(0.2, 0.1), envs=2, decisions=2, micro_batch=2)
    synchronous = overlap.Session(4, 1, tmp_path).measure("small", case, [overlap._OFF])["synchronous"]
    found = median(synchronous)
    least_s = case.decisions * (CHUNK * case.step_s + case.act_flat_s) + 4 * case.train_per_decision_s
    assert found.update_s >= least_s
    assert found.staleness_max == 0.0
    assert 0.0 < found.trainer_idle < 1.0
    assert "synchronous 1/1" in capsys.readouterr().out


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--parts", "everything"])
    assert "maniskill" in capsys.readouterr().err
