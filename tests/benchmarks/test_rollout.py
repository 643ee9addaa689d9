"""The comparison of rollout engines: it counts what envs really did, and a failing engine does not end it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processes, rollout
from benchmarks.cases import CASES
from benchmarks.collectors import NAMES
from benchmarks.counting import CountedEnvs, open_counts
from benchmarks.measure import Job
from benchmarks.table import print_table
from vla_async.emulation import EmulatedEnvs


def test_each_env_counts_its_own_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "counts")
    counts = open_counts(path, 3)
    envs: CountedEnvs = pickle.loads(pickle.dumps(CountedEnvs(inner=EmulatedEnvs(num_envs=3, chunk_size=2), path=path)))
    assert (envs.num_envs, envs.chunk_size) == (3, 2)
    for index, decisions in ((0, 2), (2, 1)):
        env = envs.make(index)
        for _ in range(decisions):
            env.step_chunk(torch.zeros(1, 2, 7))
    assert counts.tolist() == [4, 0, 2]


def test_rows_of_a_batch_count_only_their_own_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "counts")
    counts = open_counts(path, 3)
    simulator = CountedEnvs(inner=EmulatedEnvs(num_envs=3, batched=True), path=path).make_simulator(0)
    simulator.step(torch.zeros(3, 7), torch.tensor([True, False, True]))
    assert counts.tolist() == [1, 0, 1]


def test_an_engine_is_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: a process of its own, warm-up, a window, shutdown, and a row of the table."""
    found = rollout.run(Job("instant-2", "abc-threads@plain", seconds=1.0, settle_s=0.1))
    assert "error" not in found, found["error"]
    assert found["rate"] > 0.0
    assert found["delivered"] > 0.0
    assert found["start_s"] > 0.0
    assert found["pss_mb"] > 50.0
    print_table("instant-2", "about", None, {"abc-threads": [found], "broken": [{"error": "it broke"}]})
    said = capsys.readouterr().out
    assert f"{found['rate']:.0f}" in said
    assert "broken: it broke" in said


def test_a_failing_engine_is_reported_with_its_own_words() -> None:
    found = rollout.run(Job("jitter-8", "no-such-engine", seconds=1.0))
    assert "no-such-engine" in found["error"]


def test_a_tree_holds_its_root_and_what_it_uses() -> None:
    import os

    me = os.getpid()
    before = processes.cpu_s(me)
    while processes.cpu_s(me) < before + 0.02:
        sum(range(10_000))
    assert me in processes.tree(me)
    assert processes.memory(me).rss >= processes.memory(me).pss * 0.5 > 0.0


@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_what_their_names_say(name: str) -> None:
    case = CASES[name]
    assert case.envs.num_envs == int(name.rpartition("-")[2])
    assert (case.publish_every_s is None) == (name != "publish-16")
    pickle.dumps(case)


@pytest.mark.parametrize("options", [["--case", "nothing"], ["--case", "jitter-8", "--collectors", "ours@other"], []])
def test_a_wrong_command_line_says_what_there_is(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollout.main(options)
    said = capsys.readouterr().err
    assert any(word in said for word in ("jitter-16", "abc-slots", "--case"))


def test_the_default_engines_exist() -> None:
    defaults: Any = rollout._parse(["--case", "jitter-8"]).collectors
    assert {name.partition("@")[0] for name in defaults} <= set(NAMES)
    assert rollout._parse(["--case", "all", "--minutes", "2"]).seconds == 120.0
