"""What is written into a slab is what is read from it, in TorchRL's layout; and a slab that does not fit is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Unbounded

from vla_async import keys
from vla_async.collectors import slab as slab_module
from vla_async.collectors.acting import VERSION_LEAF
from vla_async.collectors.board import Board
from vla_async.collectors.row_env import RowEnv
from vla_async.collectors.slab import MASK, TRAJ_IDS, Leaf, Slab, SlabLayout, read_texts, write_text
from vla_async.collectors.slot_writer import SlotWriter

FLAGS = ("done", "terminated", "truncated")
LEAVES = (
    Leaf(("seen",), (2,), torch.float32, "observation"),
    Leaf(("text",), (8,), torch.uint8, "observation", is_text=True),
    Leaf(("reward",), (1,), torch.float32, "outcome"),
    *(Leaf((name,), (1,), torch.bool, "outcome") for name in FLAGS),
    Leaf(("action",), (1,), torch.float32, "decision"),
    Leaf((keys.VALUE,), (1,), torch.float32, "decision"),
    VERSION_LEAF,
    Leaf(TRAJ_IDS, (), torch.int64, "decision"),
)


class Script(RowEnv):
    """Rows that show (episode, step), and whose episodes have lengths that are given."""

    def __init__(self, lengths: list[list[int]]) -> None:
        super().__init__(8)
        self.lengths, self.num_rows = lengths, len(lengths)
        self.leaves = tuple(leaf for leaf in LEAVES if leaf.key[0] in ("seen", "text", "reward", *FLAGS))
        self.action_specs = {("action",): Unbounded((1,))}

    def start(self, seed: int, rows: range, episodes: Any) -> None:
        self.episode, self.step_of = np.zeros(self.num_rows, int), np.zeros(self.num_rows, int)

    def step(self, actions: Mapping[Any, Tensor], active: Any = None) -> tuple[dict[Any, Any], Any]:
        self.step_of = self.step_of + 1
        lengths = np.array([row[episode % len(row)] for row, episode in zip(self.lengths, self.episode, strict=True)])
        done = self.step_of == lengths
        terminated = done & (self.episode % 2 == 0)
        ends = zip(FLAGS, (done, terminated, done & ~terminated), strict=True)
        flags = {(name,): value[:, None] for name, value in ends}
        return self.current() | flags | {("reward",): actions[("action",)].numpy() * 10}, done

    def restart(self, done: Any, episodes: Any) -> None:
        self.episode, self.step_of = self.episode + done, np.where(done, 0, self.step_of)

    def current(self) -> dict[Any, Any]:
        texts = self._encoded([f"{episode}.{step}" for episode, step in zip(self.episode, self.step_of, strict=True)])
        return {("seen",): np.stack([self.episode, self.step_of], -1).astype(np.float32), ("text",): texts}

    def close(self) -> None:
        pass


def value(episode: float, step: float) -> float:
    return 100.0 * episode + step


def decide(slab: Slab, board: Board) -> None:
    """Play the replica: the action and the value are functions of what is seen."""
    rows = torch.from_numpy(board.slot * slab.layout.rows_per_slot + board.step)
    seen = slab.rows(("seen",))[rows]
    slab.rows(("action",))[rows] = seen.sum(-1, keepdim=True)
    slab.rows((keys.VALUE,))[rows] = 100.0 * seen[:, :1] + seen[:, 1:]
    slab.rows((keys.POLICY_VERSION,))[rows] = 3


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    decisions=st.integers(1, 6),
    spans=st.booleans(),
)
@settings(max_examples=60)
def test_what_is_written_is_what_is_read(lengths: list[list[int]], decisions: int, spans: bool) -> None:
    """For episodes of any lengths, in slots that go on with the next episode, or that hold one each."""
    env, rows = Script(lengths), len(lengths)
    if not spans:
        decisions = max(map(max, lengths))
    slots = 6 * rows
    slab = Slab(SlabLayout(LEAVES, slots, decisions, spans))
    board = Board(rows, slots, 1)
    writer = SlotWriter(env, slab, board, range(rows))
    writer.start(0)
    free, closed = list(range(slots)), list[int]()
    while len(free) >= (lacking := int((board.slot < 0).sum())):
        if lacking:
            writer.give([free.pop(0) for _ in range(lacking)])
        decide(slab, board)
        for row in writer.act():
            closed.append(writer.slot_of(row))
            ends = slab.bootstrap_rows(writer.slot_of(row))
            seen = slab.rows(("seen",))[ends]
            slab.rows((keys.VALUE,))[ends] = 100.0 * seen[:, :1] + seen[:, 1:]
            writer.leave(row)
    assert closed
    batch = slab.read(closed)
    mask = batch[MASK] if MASK in batch.keys(True) else torch.ones(batch.shape, dtype=torch.bool)
    assert bool(mask.all()) or not spans, "a fragment is always full"
    check_rows(batch, mask, lengths, spans)


def check_rows(batch: Any, mask: Tensor, lengths: list[list[int]], spans: bool) -> None:
    """Every row of a batch follows its script, from where the row before it of the same env stopped."""
    position: dict[int, tuple[int, int]] = {}
    for number, kept in zip(range(len(batch)), mask, strict=True):
        fragment = batch[number][kept]
        env = int(fragment["collector", "traj_ids"][0]) % len(lengths)
        episode, step = position.get(env, (0, 0))
        for decision in fragment:
            length = lengths[env][episode % len(lengths[env])]
            assert decision["seen"].tolist() == [episode, step]
            assert decision["text"] == f"{episode}.{step}"
            assert int(decision["collector", "traj_ids"]) == env + episode * len(lengths)
            assert float(decision["action"]) == episode + step
            assert float(decision["next", "reward"]) == 10 * (episode + step)
            assert int(decision["policy_version"]) == 3
            assert decision["next", "seen"].tolist() == [episode, step + 1], "the last sight is from before the reset"
            assert decision["next", "text"] == f"{episode}.{step + 1}"
            terminated, done = step + 1 == length and episode % 2 == 0, step + 1 == length
            assert [bool(decision["next", name]) for name in FLAGS] == [done, terminated, done and not terminated]
            assert float(decision["next", keys.VALUE]) == (0.0 if terminated else value(episode, step + 1))
            episode, step = (episode + 1, 0) if done else (episode, step + 1)
        if not spans:
            assert int(fragment["next", "done"].sum()) <= 1
            assert not bool(fragment["next", "done"][:-1].any())
        position[env] = (episode, step)


def test_a_slab_that_does_not_fit_is_refused_with_the_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Leaf(("observation", "image"), (3, 224, 224), torch.uint8, "observation")
    layout = SlabLayout((*LEAVES, image), 64, 100, True)
    assert layout.nbytes == pytest.approx(64 * 201 * (3 * 224 * 224 + 2 * 4 + 8 + 4 + 3 + 4 + 4 + 8 + 8), rel=1e-4)
    monkeypatch.setattr(slab_module, "free_shared_memory", lambda: layout.nbytes)
    layout.check_fits("max_in_flight")
    monkeypatch.setattr(slab_module, "free_shared_memory", lambda: layout.nbytes - 1)
    with pytest.raises(MemoryError, match="max_in_flight") as refusal:
        layout.check_fits("max_in_flight")
    for part in ("1.8 GiB", "64 slots of 201 rows of 147 KiB", "observation.image [3, 224, 224]", "--shm-size"):
        assert part in str(refusal.value)


def test_the_memory_of_a_slab_is_what_was_computed() -> None:
    layout = SlabLayout(LEAVES, 5, 7, True)
    assert Slab(layout).block._memory.numel() == layout.nbytes
    assert dataclasses.replace(layout, spans_episodes=False).nbytes < layout.nbytes


@given(text=st.text(max_size=8))
def test_a_text_is_read_as_it_was_written(text: str) -> None:
    row = torch.full((40,), 255, dtype=torch.uint8)
    write_text(text.replace("\0", ""), row)
    assert read_texts(row[None], (1,)).tolist() == [text.replace("\0", "")]


def test_texts_are_changed_one_at_a_time() -> None:
    """TensorDict changes a text in place: rows with equal texts would all change with one, if they shared it."""
    rows = torch.zeros(6, 8, dtype=torch.uint8)
    for row in rows:
        write_text("push", row)
    batch = TensorDict({"text": read_texts(rows, (2, 3))}, [2, 3])
    batch[0, 1] = batch[0, 1].clone().set("text", "pull")
    batch[1].set_at_("text", "lift", 2)
    batch.get("text")[1, 0].data = "turn"
    assert batch.get("text").tolist() == [["push", "pull", "push"], ["turn", "push", "lift"]]


def test_too_long_a_text_names_the_setting() -> None:
    with pytest.raises(ValueError, match="max_text_bytes"):
        write_text("é" * 5, torch.zeros(9, dtype=torch.uint8))
