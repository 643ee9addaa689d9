"""In lockstep, the values of the states in which slots end come from one forward pass, as in the synchronous loop."""

from __future__ import annotations

import pytest

from vla_async.collectors import StreamingCollector
from vla_async.emulation import EmulatedEnvs
from vla_async.policies import TinyVLAPolicy

ENVS, DECISIONS, BATCHES = 4, 3, 3


@pytest.mark.parametrize("batched", [False, True])
def test_no_end_has_a_forward_pass_of_its_own(batched: bool) -> None:
    """Each would cost as much as a decision of all envs, which makes every lockstep rollout look slower than it is."""
    envs = EmulatedEnvs(num_envs=ENVS, batched=batched, max_episode_steps=1000)
    collector = StreamingCollector(
        envs,
        TinyVLAPolicy(hidden=[8]),
        frames_per_batch=ENVS * DECISIONS,
        total_frames=ENVS * DECISIONS * BATCHES,
        async_interaction=False,
    )
    for _ in collector:
        pass
    histogram = collector.stats()["batch_size/histogram"]
    collector.shutdown()
    assert sum(histogram[1:ENVS]) == 0, f"batches by size: {histogram}"
    assert histogram[ENVS] >= (DECISIONS + 1) * BATCHES
