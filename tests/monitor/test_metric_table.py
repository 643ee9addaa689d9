"""The table of metrics: it is whole, names are found in it, and the page is made of it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vla_async.monitor import metric_table
from vla_async.monitor.metric import Family, Metric
from vla_async.monitor.metric_table import TABLE, find, markdown

ENTRIES = [entry for area in TABLE.values() for entry in area]


def test_every_constant_is_in_the_table_once_and_says_what_it_is() -> None:
    """One that is left out would be logged, and found nowhere."""
    constants = [value for value in vars(metric_table).values() if isinstance(value, Metric | Family)]
    assert sorted(map(str, constants)) == sorted(map(str, ENTRIES))
    assert len({*map(str, ENTRIES)}) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry.about.endswith(".")
        assert entry.reduced
        assert "|" not in f"{entry}{entry.unit}{entry.reduced}{entry.about}", "it would break the page's table"
    without_unit = {str(entry) for entry in ENTRIES if not entry.unit}
    assert all(name == "lr" or name == "train/grad_norm" or name.startswith("<objective>/") for name in without_unit)


@pytest.mark.parametrize(
    ("name", "entry", "labels"),
    [
        ("queue/dropped/worker ended", metric_table.DROPPED, {"reason": "worker ended"}),
        ("rollout/return", metric_table.ROLLOUT_RETURN, {"task": ""}),
        ("rollout/return/a/b", metric_table.ROLLOUT_RETURN, {"task": "a/b"}),
        ("test/success_once_low/PickCube-v1", metric_table.SUCCESS_ONCE_LOW, {"split": "test", "task": "PickCube-v1"}),
        ("my_own/approx_kl", metric_table.APPROX_KL, {"objective": "my_own"}),
        ("staleness/share_12", metric_table.STALENESS_SHARE, {"age": "12"}),
        ("time/update_s", metric_table.UPDATE_S, {}),
    ],
)
def test_a_logged_name_leads_to_its_entry(name: str, entry: Metric | Family, labels: dict[str, str]) -> None:
    assert find(name) is entry
    assert entry.labels_of(name) == labels
    if isinstance(entry, Family):
        assert entry.of(*(part for part in labels.values() if part)) == name


@pytest.mark.parametrize(
    "name", ["mine/figure", "train/success_once", "staleness/share_old", "queue/dropped/", "time/update_s/a"]
)
def test_what_is_not_in_the_table_is_not_found(name: str) -> None:
    assert find(name) is None


def test_a_family_wants_its_parts() -> None:
    for parts in [(), ("validate", "task", "more")]:
        with pytest.raises(ValueError, match="cannot be made of"):
            metric_table.SUCCESS_ONCE.of(*parts)


def test_a_metric_is_its_name_and_travels_between_ranks() -> None:
    """The names of sums are sent from rank to rank."""
    metric = metric_table.LOSS.of("ppo")
    assert {metric: 1.0} == {"ppo/loss": 1.0}
    sent = pickle.loads(pickle.dumps(metric))
    assert (sent, sent.unit, sent.reduced, sent.about) == (metric, metric.unit, metric.reduced, metric.about)


def test_the_page_holds_the_table_as_it_is() -> None:
    """Mend it by what ``python -m vla_async.monitor.metric_table`` prints."""
    assert markdown() in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
