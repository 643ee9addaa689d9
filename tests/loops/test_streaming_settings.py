"""StreamingFitLoop refuses what cannot work, with the fix, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes import ClockEnvs, make_trainer
from tests.loops.streaming_fakes import fit, known
from vla_async.collectors import slab as slab_module
from vla_async.loops import StreamingFitLoop, SyncFitLoop
from vla_async.loops.slots import SlotPlan
from vla_async.objectives import GRPO, PPO
from vla_async.placement import Placement


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, r"max_staleness=-1 must not be negative"),
        ({"max_staleness": 0}, r"max_staleness=0.*raise it, or set train_async=false"),
        ({"fragments_per_update": 0}, r"fragments_per_update=0 must be at least 1"),
        ({"straggler": "ignore"}, r"straggler='ignore': choose wait, cut, drop"),
        ({"in_flight": "keep"}, r"in_flight='keep': choose drop, save"),
        ({"selection": "newest"}, r"selection='newest': choose oldest, freshest, balanced_tasks"),
        ({"decisions_per_env": 0}, r"decisions_per_env=0 must be at least 1"),
        ({"micro_batch_size": 9, "mini_batch_size": 8}, r"micro_batch_size=9 is larger"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0 must be positive, or null"),
        ({"max_grad_norm": float("nan")}, r"max_grad_norm=nan must be positive, or null"),
        ({"env_timeout_s": float("nan")}, r"env_timeout_s=nan must be"),
        ({"max_wait_s": float("inf")}, r"fit_loop.max_wait_s=inf must be a finite number of seconds"),
        ({"micro_batch_size": 0}, r"micro_batch_size=0 must be at least 1"),
        ({"mini_batch_size": 0}, r"mini_batch_size=0 must be at least 1"),
        ({"update_epochs": 0}, r"update_epochs=0 must be at least 1"),
        ({"max_batch_size": 0}, r"fit_loop.max_batch_size=0 must be at least 1"),
        ({"max_wait_s": -1.0}, r"fit_loop.max_wait_s=-1.0 must be a finite number of seconds"),
        ({"envs_per_worker": 0}, r"fit_loop.envs_per_worker=0 must be at least 1"),
        ({"num_stages": 0}, r"fit_loop.num_stages=0 must be at least 1"),
        ({"max_restarts": -1}, r"fit_loop.max_restarts=-1 must not be negative"),
        ({"env_timeout_s": 0.0}, r"env_timeout_s=0.0 must be positive"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingFitLoop(**settings)


@pytest.mark.parametrize(
    ("settings", "envs", "message"),
    [
        (
            {"fragments_per_update": 1},
            {"num_envs": 5},
            r"room for 2.*need 5.*max_staleness to 4, or fragments_per_update to 3",
        ),
        (
            {"fragments_per_update": 3, "async_interaction": False},
            {"num_envs": 5},
            r"room for 6.*need 7.*max_staleness to 2, or fragments_per_update to 4",
        ),
        (
            {"fragments_per_update": 5, "num_stages": 2, "train_async": False},
            {"num_envs": 4, "batched": True},
            r"room for 5.*need 7.*max_staleness to 1 \(with train_async\), or fragments_per_update to 6",
        ),
        ({"num_stages": 3}, {"num_envs": 4, "batched": True}, r"num_stages=3 must divide env.num_envs=4"),
        ({"num_stages": 2}, {"num_envs": 4}, r"num_stages=2.*not batched; set it to 1"),
        (
            {"envs_per_worker": 2},
            {"num_envs": 4, "batched": True},
            r"fit_loop.envs_per_worker=2: a batched env is one process; set it to 1",
        ),
        ({"micro_batch_size": 13}, {"num_envs": 4}, r"micro_batch_size=13.*12 decisions.*4 trajectories of at most 3"),
        ({"fragments_per_update": 9000}, {}, r"room for 18000 trajectories, but 16384.*lower one of them"),
        (
            {"placement": Placement("disaggregated", ["cpu", "cpu", "cpu"]), "envs_per_worker": 2},
            {"num_envs": 4},
            r"rollout_devices has 3 devices.*2 workers.*give at most 2$",
        ),
        (
            {"placement": Placement("disaggregated", ["cpu", "cpu"]), "num_stages": 2},
            {"num_envs": 4, "batched": True},
            r"rollout_devices has 2 devices.*1 workers.*give at most 1$",
        ),
        ({"mini_batch_size": 13}, {"num_envs": 4}, r"mini_batch_size=13.*12 decisions.*4 trajectories of at most 3"),
        ({}, {"num_envs": 1, "names": ("a", "b")}, r"num_envs=1.*2 tasks.*at least 2"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_envs_is_refused_before_anything_starts(
    settings: dict[str, Any], envs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, fit_loop=StreamingFitLoop(**({"decisions_per_env": 3} | settings)), max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(known(PPO()), ClockEnvs(**envs))
    assert not list(tmp_path.iterdir()), "a run directory was made"


@given(
    envs=st.builds(dict, num_envs=st.integers(1, 12), batched=st.booleans()),
    slots=st.integers(1, 12),
    eta=st.integers(0, 3),
    stages=st.integers(1, 3),
    replicas=st.integers(1, 3),
    lockstep=st.booleans(),
    group_size=st.integers(0, 3),
)
def test_the_fix_for_too_few_slots_is_one(
    envs: dict[str, Any], slots: int, eta: int, stages: int, replicas: int, lockstep: bool, group_size: int
) -> None:
    """Whichever of the fixes that are offered is made, the plan then has room enough."""
    objective = GRPO(group_size=group_size) if group_size > 1 else PPO()

    def check(slots: int, eta: int) -> None:
        plan = SlotPlan.make(
            ClockEnvs(**envs),
            objective,
            decisions_per_env=2,
            fragments_per_update=slots,
            envs_per_worker=1,
            num_stages=stages if envs["batched"] else 1,
            num_replicas=replicas,
            lockstep=lockstep,
        )
        plan.check_room(eta)

    try:
        check(slots, eta)
    except ValueError as error:
        assume("have room for" in str(error))
        numbers = {
            name: int(value) for name, value in re.findall(r"(max_staleness|fragments_per_update) to (\d+)", str(error))
        }
        assert numbers["max_staleness"] > eta
        check(slots, numbers["max_staleness"])
        if "fragments_per_update" in numbers:
            check(numbers["fragments_per_update"], eta)


def test_a_slab_that_does_not_fit_names_the_settings_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "free_shared_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"lower fit_loop.max_staleness, fragments_per_update or decisions_per_env"):
        fit(tmp_path, known(PPO()), ClockEnvs(), max_steps=1)


def test_a_run_of_other_envs_is_not_resumed(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, known(PPO()), ClockEnvs(num_envs=3), max_steps=1)
    last = str(trainer.run.checkpoints / "last.ckpt")
    with pytest.raises(ValueError, match=r"run with env.num_envs=3, not 2; resume it with as many.*trainer.init_from"):
        fit(tmp_path, known(PPO()), ClockEnvs(num_envs=2), max_steps=2, ckpt_path=last)


def test_a_run_of_another_loop_is_not_resumed(tmp_path: Path) -> None:
    """Its envs would begin at their first episodes again."""
    streamed, _ = fit(tmp_path, known(PPO()), ClockEnvs(), max_steps=1)
    plain = make_trainer(tmp_path, fit_loop=SyncFitLoop(decisions_per_env=3), max_steps=2)
    with pytest.raises(ValueError, match=r"another fit_loop than SyncFitLoop.*trainer.init_from"):
        plain.fit(known(PPO()), ClockEnvs(), ckpt_path=str(streamed.run.checkpoints / "last.ckpt"))
    plain.fit(known(PPO()), ClockEnvs())
    with pytest.raises(ValueError, match=r"another fit_loop than StreamingFitLoop.*trainer.init_from"):
        fit(tmp_path, known(PPO()), ClockEnvs(), max_steps=3, ckpt_path=str(plain.run.checkpoints / "last.ckpt"))
