"""StreamingFitLoop refuses what cannot work, with the fix, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ClockEnvs, make_trainer
from tests.loops.streaming_fakes import known
from vla_async.loops import StreamingFitLoop
from vla_async.objectives import PPO


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, r"max_staleness=-1 must not be negative"),
        ({"max_staleness": 0}, r"max_staleness=0.*raise it, or set train_async=false"),
        ({"fragments_per_update": 0}, r"fragments_per_update=0 must be at least 1"),
        ({"straggler": "ignore"}, r"straggler='ignore': choose wait, cut or drop"),
        ({"in_flight": "keep"}, r"in_flight='keep': choose drop or save"),
        ({"selection": "newest"}, r"selection='newest': choose oldest, freshest, balanced_tasks"),
        ({"decisions_per_env": 0}, r"decisions_per_env=0 must be at least 1"),
        ({"micro_batch_size": 9, "mini_batch_size": 8}, r"micro_batch_size=9 is larger"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0 must be positive, or null"),
        ({"max_batch_size": 0}, r"max_batch_size=0 must be at least 1"),
        ({"max_wait_s": -1.0}, r"max_wait_s=-1.0 must be 0 or a positive"),
        ({"max_restarts": -1}, r"max_restarts=-1 must not be negative"),
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
            r"room for 6.*need 7.*max_staleness to 2",
        ),
        (
            {"fragments_per_update": 5, "num_stages": 2, "train_async": False},
            {"num_envs": 4, "batched": True},
            r"room for 5.*need 7.*fragments_per_update to 7",
        ),
        ({"num_stages": 3}, {"num_envs": 4, "batched": True}, r"num_stages=3 must divide env.num_envs=4"),
        ({"num_stages": 2}, {"num_envs": 4}, r"num_stages=2.*not batched; set it to 1"),
        ({"envs_per_worker": 0}, {}, r"envs_per_worker=0 must be at least 1"),
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
