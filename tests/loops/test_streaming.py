"""StreamingFitLoop: its switches, what is preferred, what becomes of stragglers, and what a resumed run holds."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.fakes import ClockEnvs, known_value, wait_until
from tests.loops.streaming_fakes import HeldEnvs, SpyPPO, balance, fit, known
from vla_async import keys
from vla_async.callbacks import Callback
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import PPO
from vla_async.placement import Placement
from vla_async.state import read_checkpoint
from vla_async.trainer import AsyncTrainer

# ---------------------------------------------------------------- switches


def test_without_train_async_nothing_is_ever_stale(tmp_path: Path) -> None:
    _, steps = fit(tmp_path, known(PPO()), ClockEnvs(), max_steps=5, train_async=False, max_staleness=3)
    assert {metrics["staleness/max"] for metrics in steps.values()} == {0.0}
    assert {metrics["staleness/bound"] for metrics in steps.values()} == {0.0}


def test_with_train_async_rollouts_go_on_while_the_trainer_trains(tmp_path: Path) -> None:
    """What is consumed after the first update had begun before its weights were there."""
    objective = SpyPPO()

    class Waits(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            if trainer.state.counters.step == 1:
                queue = trainer.fit_loop._fleet.queue
                wait_until(lambda: len(queue) >= 2, "a second batch, while the trainer is still in its first step")

    fit(tmp_path, known(objective), ClockEnvs(), Waits(), max_steps=3, max_staleness=1)
    second = torch.cat([prepared.reshape(-1) for prepared in objective.prepared[2:4]])
    assert int(second[keys.POLICY_VERSION].min()) == 0
    assert int(second[keys.STALENESS].max()) == 1


@pytest.mark.parametrize("streamer", [True, False])
def test_with_the_streamer_training_starts_before_the_batch_is_complete(streamer: bool, tmp_path: Path) -> None:
    """One env is held until the trainer has begun with the other's fragment; without the streamer that never comes."""
    gate, began = tmp_path / "gate", tmp_path / "began"
    gate.touch()

    class Tells(SpyPPO):
        def __call__(self, policy: Any, batch: TensorDictBase) -> Any:
            began.touch()
            return super().__call__(policy, batch)

    early: list[bool] = []

    def open_gate() -> None:
        if streamer:
            wait_until(began.exists, "training begins")
        time.sleep(0.5)
        early.append(began.exists())
        gate.unlink()

    opener = threading.Thread(target=open_gate)
    opener.start()
    objective = Tells()
    settings: dict[str, Any] = {"streamer": streamer, "train_async": False}  # so that both envs are in the batch
    fit(tmp_path, known(objective), HeldEnvs(gate=str(gate), held_env=1, together=True), max_steps=1, **settings)
    opener.join()
    assert early == [streamer]
    assert [len(prepared) for prepared in objective.prepared] == ([1, 1] if streamer else [2])


@pytest.mark.parametrize("async_interaction", [True, False])
def test_with_async_interaction_no_env_waits_for_another(async_interaction: bool, tmp_path: Path) -> None:
    """One env is held in its first step: the other fills fragment after fragment, or, in lockstep, none at all."""
    gate = tmp_path / "gate"
    gate.touch()
    found: list[int] = []

    class Counts(Callback):
        def on_start(self, trainer: AsyncTrainer) -> None:
            def look() -> None:
                fleet = trainer.fit_loop._fleet
                wait_until(lambda: hasattr(fleet, "board"), "the rollout begins")
                wait_until(lambda: int(fleet.board.decisions[0]) >= (6 if async_interaction else 1), "env 0 decides")
                if not async_interaction:
                    wait_until(lambda: float(fleet.board.busy[0]) > 0.0, "env 0 has stepped")
                found.append(int(fleet.board.decisions[0]))
                gate.unlink()

            self.thread = threading.Thread(target=look)
            self.thread.start()

    counts = Counts()
    envs = HeldEnvs(gate=str(gate), held_env=1)
    fit(tmp_path, known(PPO()), envs, counts, max_steps=2, max_staleness=2, async_interaction=async_interaction)
    counts.thread.join()
    assert found[0] >= 6 if async_interaction else found[0] <= 2


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_every_replica_of_the_placement_answers(devices: list[str], tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            seen[:] = [int(tally.sizes.sum()) for tally in trainer.fit_loop._fleet.tallies]

    placement = Placement(mode="disaggregated", rollout_devices=devices)
    fit(tmp_path, known(PPO()), ClockEnvs(num_envs=4), Looks(), placement=placement)
    assert len(seen) == len(devices)
    assert min(seen) > 0


# ---------------------------------------------------------------- counters


def test_the_counters_add_up_at_every_step_and_are_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, steps = fit(tmp_path, known(PPO()), ClockEnvs(num_envs=3), max_steps=5, max_staleness=2)
    assert all(balance(metrics) for metrics in steps.values())
    assert [metrics["queue/consumed"] for metrics in steps.values()] == [3.0, 6.0, 9.0, 12.0, 15.0]
    shares = [name for name in steps[5] if name.startswith("staleness/share_")]
    assert sum(steps[5][name] for name in shares) == pytest.approx(1.0)
    assert len(shares) == 3
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trajectories:")]
    assert "15 consumed" in line
    assert "in_flight" in line


# ---------------------------------------------------------------- what is preferred


def test_with_balanced_tasks_an_update_takes_of_each_task_that_waits(tmp_path: Path) -> None:
    """Six fragments wait, all equally old, of both tasks, and two of them are taken."""
    objective, waiting = SpyPPO(), list[set[bytes]]()

    class Waits(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            if trainer.state.counters.step == 1:
                queue = trainer.fit_loop._fleet.queue
                wait_until(lambda: len(queue) >= 6, "all that began with the first weights")
                waiting.append({queue._task_of(bundle) for bundle in list(queue._ready)[:6]})

    envs = ClockEnvs(num_envs=4, names=("a", "b"))
    settings: dict[str, Any] = {"max_staleness": 3, "fragments_per_update": 2, "selection": "balanced_tasks"}
    _, steps = fit(tmp_path, known(objective), envs, Waits(), max_steps=6, **settings)
    assert len(waiting[0]) == 2
    assert {int(prepared[keys.STATE][0, 0, 2]) for prepared in objective.prepared[2:4]} == {0, 1}
    assert max(metrics["staleness/max"] for metrics in steps.values()) <= 3.0


# ---------------------------------------------------------------- stragglers


class OpensWhenDue(Callback):
    """Removes a file once the queue has asked for an early end, or after a step."""

    def __init__(self, gate: Path, step: int, cut: bool) -> None:
        self.gate, self.step, self.cut = gate, step, cut

    def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
        if trainer.state.counters.step == self.step:
            board = trainer.fit_loop._fleet.board

            def open_gate() -> None:
                if self.cut:
                    wait_until(lambda: bool(board.cut.any()), "the straggler is told to end")
                self.gate.unlink()

            self.thread = threading.Thread(target=open_gate)
            self.thread.start()


def straggle(root: Path, how: str) -> tuple[SpyPPO, dict[int, dict[str, float]]]:
    """Env 1 is held at its fifth env step, that is in the third of five decisions of its first fragment."""
    gate = root / "gate"
    gate.touch()
    objective = SpyPPO(normalize_advantages=False, gamma=0.9, gae_lambda=0.8)
    opens = OpensWhenDue(gate, 2, cut=how != "wait")
    envs = HeldEnvs(gate=str(gate), held_env=1, held_step=5, together=True, max_episode_steps=12)
    settings: dict[str, Any] = {"max_staleness": 2, "fragments_per_update": 1, "decisions_per_env": 5, "straggler": how}
    _, steps = fit(root, known(objective), envs, opens, max_steps=5, **settings)
    opens.thread.join()
    assert max(metrics["staleness/max"] for metrics in steps.values()) == 2.0 or how == "drop"
    assert max(metrics["staleness/max"] for metrics in steps.values()) <= 2.0
    assert all(balance(metrics) for metrics in steps.values())
    return objective, steps


def env_of(prepared: TensorDictBase) -> int:
    return int(prepared["collector", "traj_ids"][0, 0]) % 2


def test_a_straggler_is_waited_for(tmp_path: Path) -> None:
    """Two updates are made without it; at the third its first decision would get too old."""
    objective, steps = straggle(tmp_path, "wait")
    assert [env_of(prepared) for prepared in objective.prepared[:3]] == [0, 0, 1]
    assert objective.prepared[2].shape == (1, 5)
    assert steps[3]["staleness/max"] == 2.0
    assert steps[5]["queue/cut"] == 0.0


def test_a_straggler_is_cut_and_its_advantages_bootstrap_from_where_it_was_cut(tmp_path: Path) -> None:
    objective, steps = straggle(tmp_path, "cut")
    cut = objective.prepared[2]
    assert env_of(cut) == 1
    assert cut.shape == (1, 3), "it ends with the decision that was being made"
    assert not bool(cut[keys.DONE].any())
    assert steps[3]["queue/cut"] == 1.0
    value = known_value(cut[keys.STATE], cut[keys.INSTRUCTION_TOKENS])[0, :, 0]
    following = known_value(cut["next", "observation", "state"], cut[keys.INSTRUCTION_TOKENS])[0, :, 0]
    reward = cut[keys.STEP_REWARDS][0].sum(-1)
    expected, later = torch.zeros(3, dtype=torch.float64), 0.0
    for t in reversed(range(3)):  # nothing ended, so the last value is that of the state it was cut in
        later = float(reward[t]) + 0.9 * float(following[t]) - float(value[t]) + 0.9 * 0.8 * later
        expected[t] = later
    torch.testing.assert_close(cut[keys.ADVANTAGE][0, :, 0].double(), expected, rtol=1e-5, atol=1e-3)


def test_a_straggler_is_dropped_and_counted(tmp_path: Path) -> None:
    objective, steps = straggle(tmp_path, "drop")
    assert [env_of(prepared) for prepared in objective.prepared[:3]] == [0, 0, 0]
    assert steps[5]["queue/dropped/straggler"] >= 1.0  # where the machine is slow, the other env may be late once, too


# ---------------------------------------------------------------- lowering η while it runs


def test_the_bound_can_be_lowered_while_rollouts_go_on(tmp_path: Path) -> None:
    """From the next update on it holds; what is too old by then is dropped and counted, and a resumed run keeps to it."""

    class Lowers(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            if trainer.state.counters.step == 3:
                trainer.fit_loop.lower_staleness(1)

    trainer, steps = fit(tmp_path, known(PPO()), ClockEnvs(num_envs=3), Lowers(), max_steps=12, max_staleness=4)
    assert [steps[step]["staleness/bound"] for step in (3, 4, 12)] == [4.0, 1.0, 1.0]
    assert max(steps[step]["staleness/max"] for step in range(4, 13)) <= 1.0
    assert all(balance(metrics) for metrics in steps.values())
    late = [steps[step].get("queue/dropped/stale", 0.0) for step in (8, 12)]
    assert late[0] == late[1], "with fewer slots in circulation, nothing gets too old any more"
    last = str(trainer.run.checkpoints / "last.ckpt")
    _, more = fit(tmp_path, known(PPO()), ClockEnvs(num_envs=3), max_steps=14, max_staleness=4, ckpt_path=last)
    assert more[14]["staleness/bound"] == 1.0


@pytest.mark.parametrize(
    ("to", "message"), [(3, "is 2, lower it"), (-1, "lower it"), (0, r"room for 2.*need 4.*max_staleness to 1")]
)
def test_a_bound_that_cannot_be_is_refused_while_it_runs(to: int, message: str, tmp_path: Path) -> None:
    class Lowers(Callback):
        def on_step_end(self, trainer: AsyncTrainer, metrics: Any) -> None:
            with pytest.raises(ValueError, match=message):
                trainer.fit_loop.lower_staleness(to)

    _, steps = fit(
        tmp_path, known(PPO()), ClockEnvs(num_envs=4), Lowers(), max_steps=2, max_staleness=2, fragments_per_update=2
    )
    assert steps[2]["staleness/bound"] == 2.0


def test_there_is_no_bound_to_lower_when_nothing_runs() -> None:
    with pytest.raises(RuntimeError, match="only while fit runs"):
        StreamingFitLoop().lower_staleness(0)


# ---------------------------------------------------------------- resume


def test_a_resumed_run_acts_with_the_resumed_version_and_counts_what_was_in_flight(tmp_path: Path) -> None:
    first = SpyPPO()
    trainer, _ = fit(tmp_path, known(first), ClockEnvs(num_envs=3), max_steps=4, max_staleness=2)
    last = trainer.run.checkpoints / "last.ckpt"
    state = read_checkpoint(last)["loop"]["rollouts"]
    assert state["queue"]["consumed"] == 12
    again = SpyPPO()
    _, more = fit(tmp_path, known(again), ClockEnvs(num_envs=3), max_steps=6, max_staleness=2, ckpt_path=str(last))
    fresh = torch.cat([prepared.reshape(-1) for prepared in again.prepared])
    assert int(fresh[keys.POLICY_VERSION].min()) == 4, "a decision was made with weights from before the resume"
    assert max(metrics["staleness/max"] for metrics in more.values()) <= 1.0
    assert more[5].get("queue/dropped/resume", 0.0) == state["queue"]["in_flight"]
    assert more[5]["queue/consumed"] == 15.0
    assert all(balance(metrics) for metrics in more.values())
    old = {int(seed) for prepared in first.prepared for seed in prepared["collector", "seed"].flatten()}
    assert not old & set(fresh["collector", "seed"].flatten().tolist()), "an episode was played again"
