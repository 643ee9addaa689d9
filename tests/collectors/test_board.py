"""The numbers by which the processes of a rollout know of each other."""

from __future__ import annotations

from vla_async.collectors.board import Board


def test_what_a_worker_is_doing_now_counts_as_busy() -> None:
    # else a step that is longer than an update would count in the update in which it ends, and that one would be busy beyond
    # all of its time
    board = Board(num_rows=3, num_slots=3, num_workers=3)
    board.busy[:] = [5.0, 5.0, 0.0]
    board.busy_since[:] = [0.0, 97.0, 90.0]
    assert board.busy_s(100.0).tolist() == [5.0, 8.0, 10.0]
    assert board.busy.tolist() == [5.0, 5.0, 0.0]
