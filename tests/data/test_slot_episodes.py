"""Training episodes are put together from their slots, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ClockEnvs
from vla_async import keys
from vla_async.collectors.acting import all_leaves
from vla_async.collectors.board import Board
from vla_async.collectors.groups import Grouping
from vla_async.collectors.row_env import FactoryRows
from vla_async.collectors.slab import Leaf, Slab, SlabLayout
from vla_async.collectors.slot_writer import SlotWriter
from vla_async.collectors.wires import EnvAddress
from vla_async.data.slot_episodes import SlotRecorder
from vla_async.data.trajectories import Trajectory
from vla_async.data.trajectory_store import Recording, TrajectoryStore

H = 2


class Rollout:
    """Two rows of a batch in this process, whose slots are handed out as they are closed.

    Args:
        root: where episodes are saved.
        decisions: T of a slot.
        whole: whether each slot holds one episode.
    """

    def __init__(self, root: Path, decisions: int, whole: bool = False, **envs: Any) -> None:
        self.factory = ClockEnvs(num_envs=2, batched=True, **({"chunk_size": H, "max_episode_steps": 5} | envs))
        rows = FactoryRows(self.factory.make(0), 64, Grouping(1, 2) if whole else None)
        leaves = all_leaves(rows.leaves, [Leaf((keys.VALUE,), (1,), torch.float32, "decision")])
        self.slab = Slab(SlabLayout(leaves, 40, decisions, spans_episodes=not whole))
        self.board = Board(2, 40, 1)
        self.writer = SlotWriter(rows, self.slab, self.board, range(2))
        self.writer.start(0)
        self._free, self._decisions = list(range(40)), 0
        recording = Recording(root, 9, 9, 2**24, False, train_every_n_steps=1)
        self.store = TrajectoryStore(recording)
        self.recorder = SlotRecorder(self.slab, [EnvAddress(0, 0, range(2), 0)], self.factory, self.store)
        self.recorder.begin(0)

    def closed(self) -> Iterator[int]:
        """Play, and yield the number of each slot when it is full."""
        while True:
            if lacking := int((self.board.slot < 0).sum()):
                self.writer.give([self._free.pop(0) for _ in range(lacking)])
            at = torch.from_numpy(self.board.slot * self.slab.layout.rows_per_slot + self.board.step)
            self._decisions += 1
            self.slab.rows(keys.CHUNK)[at] = 0.01 * self._decisions
            self.slab.rows((keys.VALUE,))[at] = float(self._decisions)
            self.slab.rows((keys.POLICY_VERSION,))[at] = self._decisions
            for row in self.writer.act():
                slot = self.writer.slot_of(row)
                self.writer.leave(row)
                yield slot

    def saved(self) -> list[Trajectory]:
        """What has been saved, by seed and the version at the end."""
        self.store.close()
        return [Trajectory.load(path) for path in sorted(self.store.recording.directory.rglob("*.pt"))]


def check_whole(episode: Trajectory) -> None:
    """All its decisions in their order, from the first: the env counts its steps, and the actions tell the decisions."""
    steps = episode.info["env_steps"]
    before = episode.decisions[keys.STATE][:, 1].tolist()
    assert before == [H * number for number in range(len(before))], "a decision is missing or doubled"
    assert int(episode.decisions[keys.EXECUTED].sum()) == steps
    assert episode.final_observation["state"][1] == steps
    assert episode.decisions[keys.DONE].flatten().tolist() == [False] * (len(before) - 1) + [True]
    numbers = episode.decisions[keys.POLICY_VERSION].flatten()
    assert (numbers.diff() == 1).all()
    assert torch.equal(episode.decisions[keys.VALUE].flatten(), numbers.float())
    assert torch.allclose(episode.decisions[keys.CHUNK], 0.01 * numbers.reshape(-1, 1, 1).float())
    assert float(episode.decisions[keys.STEP_REWARDS].double().sum()) == pytest.approx(episode.info["return"])
    assert (episode.decisions[keys.STATE][:, 0] == episode.info["seed"] % 997).all()


@pytest.mark.parametrize("decisions", [1, 2, 3, 7])
def test_episodes_across_fragments_are_whole(tmp_path: Path, decisions: int) -> None:
    """With fragments shorter than an episode (of 3 decisions), as long, and longer."""
    rollout = Rollout(tmp_path, decisions, success_at=3, success_every=2)
    for slot, _ in zip(rollout.closed(), range(24 // decisions), strict=False):
        rollout.recorder.add([slot])
    episodes = rollout.saved()
    assert len(episodes) >= 4
    assert {episode.info["row"] for episode in episodes} == {0, 1}
    for episode in episodes:
        check_whole(episode)
        assert episode.info["success_once"] == (episode.info["seed"] % 2 == 0)
        assert episode.info["instruction"] == "watch the clock"
        assert episode.info["env"]["init_args"]["num_envs"] == 2
    assert {episode.info["success_once"] for episode in episodes} == {True, False}
    assert not rollout.store.skipped


def test_an_episode_of_which_a_part_was_dropped_is_skipped_and_counted(tmp_path: Path) -> None:
    """What is left of it would replay as another episode."""
    rollout = Rollout(tmp_path, decisions=1)
    slots = [slot for slot, _ in zip(rollout.closed(), range(18), strict=False)]  # three episodes of two rows
    dropped = slots[2]  # the second decision of row 0's first episode
    for slot in slots:
        if slot != dropped:
            rollout.recorder.add([slot])
    episodes = rollout.saved()
    assert len(episodes) == 5
    for episode in episodes:
        check_whole(episode)
    assert rollout.store.skipped == {"a part of the episode was dropped": 1}


def test_slots_of_whole_episodes_are_saved_as_they_are(tmp_path: Path) -> None:
    """As groups have them, where they end at their own pace."""
    rollout = Rollout(tmp_path, decisions=3, whole=True, success_at=2, success_every=2)
    for slot, _ in zip(rollout.closed(), range(8), strict=False):
        rollout.recorder.add([slot])
    episodes = rollout.saved()
    assert len(episodes) == 8
    assert {len(episode.decisions) for episode in episodes} == {1, 3}
    for episode in episodes:
        check_whole(episode)


def test_nothing_is_followed_once_there_are_enough(tmp_path: Path) -> None:
    """Nor before the next update that is looked at."""
    rollout = Rollout(tmp_path, decisions=1)
    for _ in range(9):
        rollout.recorder.quota.take("clock", False)
        rollout.recorder.quota.take("clock", True)
    for slot, _ in zip(rollout.closed(), range(12), strict=False):
        rollout.recorder.add([slot])
    assert not rollout.recorder._growing
    assert rollout.saved() == []


def test_a_stage_of_a_batch_is_an_env_of_its_own(tmp_path: Path) -> None:
    """A file names the env that has the row, not the whole that it was cut from."""
    rollout = Rollout(tmp_path, decisions=1)
    envs = [EnvAddress(0, 0, range(3), 0), EnvAddress(0, 1, range(3, 6), 0)]
    recorder = SlotRecorder(rollout.slab, envs, ClockEnvs(num_envs=6, batched=True), rollout.store)
    place = recorder._place(4)
    assert (place["env_index"], place["row"], place["env"]["init_args"]["num_envs"]) == (3, 1, 3)
    single = SlotRecorder(rollout.slab, [EnvAddress(0, 0, range(4, 5), 0)], ClockEnvs(num_envs=6), rollout.store)
    place = single._place(4)
    assert (place["env_index"], place["row"], place["env"]["init_args"]["num_envs"]) == (4, 0, 6)
    rollout.store.close()
