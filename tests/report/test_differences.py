"""Settings beside each other."""

from __future__ import annotations

from vla_async.report.differences import setting_rows


def test_settings_are_named_in_full_and_differences_are_seen() -> None:
    loop = {"class_path": "Loop", "init_args": {"epochs": 4}}
    rows = setting_rows(
        [{"trainer": {"seed": 0, "loop": loop}}, {"trainer": {"seed": 1, "loop": loop, "new": [None, True]}}]
    )
    assert [(row.name, row.values) for row in rows] == [
        ("trainer.seed", ["0", "1"]),
        ("trainer.loop.class_path", ["Loop", "Loop"]),
        ("trainer.loop.epochs", ["4", "4"]),
        ("trainer.new", ["–", "[null, true]"]),
    ]
    assert [row.differs for row in rows] == [True, False, False, True]


def test_a_run_without_settings_differs_in_all() -> None:
    (row,) = setting_rows([{"a": {}}, {}])
    assert (row.values, row.differs) == (["{}", "–"], True)
