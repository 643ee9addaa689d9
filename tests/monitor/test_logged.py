"""What runs log: under names of the table, in the same columns, of the update alone, and to every logger."""

from __future__ import annotations

import csv
import math
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.fakes import ClockEnvs, KnownPolicy, Steady, make_trainer, tiny
from tests.loops.streaming_fakes import known
from vla_async.callbacks import Callback
from vla_async.loops import CollectLoop, EvaluateLoop, SFTLoop, StreamingFitLoop, SyncFitLoop
from vla_async.monitor.loggers import TensorBoard
from vla_async.monitor.metric_table import find
from vla_async.monitor.prometheus import PrometheusLogger
from vla_async.objectives import GRPO, PPO
from vla_async.trainer import AsyncTrainer

ALERTS = Path(__file__).parents[2] / "docs" / "prometheus_alerts.yml"


@dataclass
class Logged(Callback):
    """All metrics of every step, and what Prometheus is given at each."""

    logger: PrometheusLogger | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)

    def on_step_end(self, trainer: AsyncTrainer, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))
        if self.logger is not None:
            self.url = self.logger.url
            with urllib.request.urlopen(self.url) as answer:
                self.pages.append(answer.read().decode())


def lines(trainer: AsyncTrainer) -> list[dict[str, str]]:
    with (trainer.run.path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def unknown(trainer: AsyncTrainer) -> set[str]:
    return {name for line in lines(trainer) for name in line if find(name) is None}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[AsyncTrainer, Logged]:
    """A streaming run on two tasks, with every logger and a validation after each second update."""
    logger = PrometheusLogger(port=0)
    logged = Logged(logger)
    loop = StreamingFitLoop(decisions_per_env=3, update_epochs=2, max_staleness=2, envs_per_worker=2)
    trainer = make_trainer(
        tmp_path_factory.mktemp("streamed"),
        fit_loop=loop,
        evaluate_loop=EvaluateLoop(num_episodes=1, num_envs=2, num_videos=0),
        max_steps=4,
        val_every_n_steps=2,
        callbacks=[logged],
        loggers=[TensorBoard(), logger],
        num_threads=1,
    )
    trainer.fit(known(PPO()), ClockEnvs(num_envs=4, names=("a", "b"), success_at=2, max_episode_steps=4))
    return trainer, logged


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> tuple[AsyncTrainer, Logged]:
    """One update of one SGD step, of the synchronous loop, without clipping."""
    logged = Logged()
    loop = SyncFitLoop(decisions_per_env=3, update_epochs=1, max_grad_norm=None)
    trainer = make_trainer(tmp_path_factory.mktemp("stepped"), fit_loop=loop, max_steps=1, callbacks=[logged])
    trainer.fit(known(PPO()), ClockEnvs(num_envs=2))
    return trainer, logged


def test_a_streaming_run_logs_names_of_the_table_with_all_axes_in_each_line(streamed: tuple[AsyncTrainer, Logged]) -> None:
    trainer, _ = streamed
    assert unknown(trainer) == set()
    assert len(lines(trainer)) == 5, "the validation before the first update has a line of its own"
    for line in lines(trainer):
        assert all(line[axis] for axis in ("step", "env_steps", "episodes", "elapsed_s"))


def test_every_update_of_a_streaming_run_logs_the_same(streamed: tuple[AsyncTrainer, Logged]) -> None:
    """A column that comes later makes Lightning write the file anew."""
    _, logged = streamed
    steady = [{name for name in step if not name.startswith(("rollout/", "validate/"))} for step in logged.steps]
    assert steady[0] == steady[1] == steady[2] == steady[3]
    families = ("batch_size/share_", "queue/dropped/", "memory/", "request_wait_s/", "forward_s/", "staleness/share_")
    for family in families:
        assert [name for name in steady[0] if name.startswith(family)], family
    single = "worker/no_slot_share queue/waiting queue/occupied_share time/decisions_per_s time/samples_per_s ppo/ratio"
    assert {*single.split(), "staleness/min", "batch_size/limit", "train/grad_norm"} <= steady[0]


def test_what_is_logged_of_an_update_is_of_that_update(streamed: tuple[AsyncTrainer, Logged]) -> None:
    _, logged = streamed
    batched = [step for step in logged.steps if not math.isnan(step["batch_size/mean"])]  # else all of it waited before
    assert batched
    for step in batched:
        assert sum(value for name, value in step.items() if name.startswith("batch_size/share_")) == pytest.approx(1.0)
        assert 1.0 <= step["batch_size/mean"] <= step["batch_size/limit"]
        assert 0.0 < step["request_wait_s/p50"] <= step["request_wait_s/p95"] <= step["request_wait_s/p99"]
    for step in logged.steps:
        assert sum(value for name, value in step.items() if name.startswith("staleness/share_")) == pytest.approx(1.0)
        assert 0.0 <= step["queue/occupied_share"] <= 1.0
        assert 0.0 <= step["worker/no_slot_share"] <= 1.0
        assert step["staleness/min"] <= step["staleness/mean"] <= step["staleness/max"] <= step["staleness/bound"]
        # four fragments of three decisions, each trained on twice
        assert step["time/decisions_per_s"] * step["time/update_s"] == pytest.approx(12.0)
        assert step["time/samples_per_s"] == pytest.approx(2.0 * step["time/decisions_per_s"])
        assert step["memory/trainer_mib"] > 10.0
        assert min(step["memory/workers_mib"], step["memory/replicas_mib"], step["memory/slab_mib"]) > 0.0
    assert logged.steps[-1]["batch_size/limit"] == 4.0


def test_training_episodes_are_told_apart_by_task(streamed: tuple[AsyncTrainer, Logged]) -> None:
    _, logged = streamed
    step = next(step for step in logged.steps if {"rollout/episodes/a", "rollout/episodes/b"} <= step.keys())
    counts = [step["rollout/episodes/a"], step["rollout/episodes/b"]]
    assert sum(counts) == step["rollout/episodes"]
    for name in ("success_once", "success_at_end", "return", "episode_env_steps"):
        of_tasks = [step[f"rollout/{name}/{task}"] for task in "ab"]
        assert step[f"rollout/{name}"] == pytest.approx(
            sum(map(math.prod, zip(counts, of_tasks, strict=True))) / sum(counts)
        )


def test_tensorboard_events_lie_in_the_run_directory_and_hold_what_was_logged(streamed: tuple[AsyncTrainer, Logged]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, logged = streamed
    events = EventAccumulator(str(trainer.run.path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("staleness/mean")}
    assert found == {number + 1: pytest.approx(step["staleness/mean"]) for number, step in enumerate(logged.steps)}
    assert {event.step for event in events.Scalars("validate/success_once/a")} == {0, 2, 4}


def test_prometheus_is_given_the_newest_values_with_their_meaning(streamed: tuple[AsyncTrainer, Logged]) -> None:
    _, logged = streamed
    for number, (page, step) in enumerate(zip(logged.pages, logged.steps, strict=True), 1):
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(values["vla_async_step"]) == number
        assert float(values["vla_async_time_env_steps_per_s"]) == pytest.approx(step["time/env_steps_per_s"])
        assert float(values['vla_async_staleness_share{age="2"}']) == pytest.approx(step["staleness/share_2"])
        assert float(values['vla_async_queue_dropped{reason="worker ended"}']) == 0.0
    assert 'vla_async_validate_success_once{task="b"}' in values
    assert 'vla_async_rollout_success_once{task=""}' in values
    assert "# HELP vla_async_worker_idle_share Env workers neither stepped nor wrote: they waited. (share, " in page


def test_no_port_and_no_thread_outlive_the_run(streamed: tuple[AsyncTrainer, Logged]) -> None:
    _, logged = streamed
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(logged.url)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_the_alerts_name_what_is_exported(streamed: tuple[AsyncTrainer, Logged]) -> None:
    """An alert on a name that is not there never rings."""
    _, logged = streamed
    exported = {re.split(r"[{ ]", line)[0] for line in logged.pages[-1].splitlines() if not line.startswith("#")}
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    named = {rule["alert"]: {*re.findall(r"\bvla_async_\w+", rule["expr"])} for rule in group["rules"]}
    assert len(named) == 7
    for alert, names in named.items():
        assert names, alert
        assert names <= exported, alert


def test_a_run_that_fails_to_begin_closes_the_port(tmp_path: Path) -> None:
    """The second logger cannot have the first one's port; the first must not keep it."""
    first = PrometheusLogger(port=0)
    first.begin_run(tmp_path)
    taken = int(first.url.split(":")[2].split("/")[0])
    try:
        logger = PrometheusLogger(port=0)
        trainer = make_trainer(tmp_path, max_steps=1, loggers=[logger, PrometheusLogger(port=taken)])
        with pytest.raises(ValueError, match=rf"PrometheusLogger.port={taken} .*cannot be opened: .*; choose another, or 0"):
            trainer.fit(known(PPO()), ClockEnvs())
        with pytest.raises(RuntimeError, match="while a run lasts"):
            _ = logger.url
    finally:
        first.finalize("success")


def test_a_validation_beside_training_moves_no_axis_back() -> None:
    logger = PrometheusLogger()
    logger.log_metrics({"env_steps": 500.0, "lr": 0.1}, step=5)
    logger.log_metrics({"env_steps": 200.0, "validate/return": 3.0}, step=2)
    samples = {sample.name: sample.value for family in logger.collect() for sample in family.samples}
    assert samples == {
        "vla_async_env_steps": 500.0,
        "vla_async_lr": 0.1,
        "vla_async_validate_return": 3.0,
        "vla_async_step": 5,
    }


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_there_is_not_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"PrometheusLogger.port={port} must be between 0"):
        PrometheusLogger(port=port)


def test_a_synchronous_run_logs_what_it_can_be_compared_by(stepped: tuple[AsyncTrainer, Logged]) -> None:
    trainer, logged = stepped
    assert unknown(trainer) == set()
    [step] = logged.steps
    assert step["trainer/idle_share"] == step["time/rollout_s"] / step["time/update_s"]
    assert 0.0 <= step["worker/idle_share"] < 1.0
    ages = ("staleness/min", "staleness/mean", "staleness/max", "staleness/bound")
    assert [step[name] for name in ages] == [0.0] * 4
    assert step["time/samples_per_s"] * step["time/update_s"] == pytest.approx(6.0)


def test_the_gradient_norm_is_that_before_clipping(stepped: tuple[AsyncTrainer, Logged], tmp_path: Path) -> None:
    """Plain SGD moves the one parameter by the rate times the gradient, which says what that was."""
    trainer, logged = stepped
    assert isinstance(trainer.policy, KnownPolicy)
    norm = abs(float(trainer.policy.bias)) / 0.1
    assert norm > 1.0
    assert logged.steps[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = Logged()
    loop = SyncFitLoop(decisions_per_env=3, update_epochs=1, max_grad_norm=0.5)
    make_trainer(tmp_path, fit_loop=loop, max_steps=1, callbacks=[clipped]).fit(
        policy := known(PPO()), ClockEnvs(num_envs=2)
    )
    assert abs(float(policy.bias)) == pytest.approx(0.1 * 0.5, rel=1e-3)
    assert clipped.steps[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_grpo_imitation_and_evaluations_log_names_of_the_table(tmp_path: Path) -> None:
    envs = ClockEnvs(num_envs=2, success_at=3, success_every=2)
    grpo = make_trainer(tmp_path / "grpo", fit_loop=StreamingFitLoop(update_epochs=1), max_steps=1, num_threads=1)
    objective = GRPO(group_size=2, filter_equal_groups=False, kl_coef=0.1, correction="decoupled")
    grpo.fit(tiny(objective=objective), envs)
    assert unknown(grpo) == set()
    assert {"grpo/groups", "grpo/reference_kl", "grpo/importance_weight", "grpo/ratio"} <= lines(grpo)[0].keys()
    CollectLoop(Steady(0.5), num_episodes=2, directory=tmp_path / "set").run(ClockEnvs(num_envs=1, success_at=3), seed=0)
    loop = SFTLoop(tmp_path / "set", max_steps=2, batch_size=4, log_every_n_steps=1)
    sft = make_trainer(tmp_path / "sft", sft_loop=loop, check_memory=False)
    policy = tiny(objective=None)
    sft.sft(policy, envs)
    assert unknown(sft) == set()
    assert {"train/grad_norm", "sft/squared_error"} <= lines(sft)[0].keys()
    sft.evaluate_loop = EvaluateLoop(num_episodes=1, num_videos=0)
    sft.test(policy, envs)
    assert unknown(sft) == set()
    assert {"test/success_once", "env_steps", "elapsed_s"} <= lines(sft)[0].keys()
