"""The page: nothing that a run holds can become code in it, nothing in it needs the network, and large runs stay small."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import evaluation, streaming_lines, update, write_run
from vla_async.report.page import MAX_RUNS, content_policy, write_report
from vla_async.report.run_data import RunData, read_run

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


class Page(HTMLParser):
    """The tags of a page with their attributes, its scripts, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open: str = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._open != "style":
            self.text += f" {data}"

    @property
    def model(self) -> Any:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "model"))


def hostile_run(tmp_path: Path) -> RunData:
    config = f"# vla-async fit {HOSTILE}\nenv:\n  task: {json.dumps(HOSTILE)}\n"
    lines = [evaluation(0, 0.5, (HOSTILE, "other")), update(1) | {f"queue/dropped/{HOSTILE}": 1}]
    path = write_run(tmp_path / f"<b>{'x' * 3}" / "1", lines, config, {HOSTILE: HOSTILE})
    (path / "trajectories" / "<i>task").mkdir(parents=True)
    (path / "trajectories" / "<i>task" / "<i>.pt").touch()
    return read_run(path)


def test_what_a_run_holds_is_text_and_no_markup(tmp_path: Path) -> None:
    page = Page(write_report([hostile_run(tmp_path)], tmp_path / "report.html"))
    assert len(page.scripts) == 4
    assert not {"img", "i", "b"} & {tag for tag, attributes in page.tags if not attributes.get("class")} - {"b"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count(HOSTILE) >= 3  # in the command, the settings and the table of tasks
    assert any(row["label"] == HOSTILE for chart in page.model["charts"] for row in chart.get("rows", []))


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = Page(write_report([hostile_run(tmp_path)], tmp_path / "report.html"))
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "poster"):
            address = attributes.get(name) or "#"
            assert address.startswith(("#", "data:")), f"<{tag} {name}={address}>"
    (policy,) = [attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")]
    scripts = [text for attributes, text in page.scripts if "id" not in attributes]
    assert policy == content_policy(*scripts)
    assert "http" not in str(policy)


def test_a_run_of_many_updates_gives_a_page_that_can_be_used(tmp_path: Path) -> None:
    """100,000 updates would be some hundred MB; drawn are at most 600 points per line, and the page says so."""
    run = read_run(write_run(tmp_path / "1", [update(step, ppo__approx_kl=0.1) for step in range(1, 5002)]))
    page = Page(write_report([run], tmp_path / "report.html"))
    columns = page.model["runs"][0]["updates"]["columns"]
    assert len(columns["ppo/approx_kl"]) <= 600
    assert "stands for 9 updates" in page.text


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    lines = [update(1, ppo__entropy=1.0), update(2, ppo__entropy=float("nan")), update(3, ppo__entropy=float("inf"))]
    page = Page(write_report([read_run(write_run(tmp_path / "1", lines))], tmp_path / "report.html"))
    assert page.model["runs"][0]["updates"]["columns"]["ppo/entropy"] == [1.0, None, None]


def test_several_runs_show_what_differs(tmp_path: Path) -> None:
    runs = [
        read_run(
            write_run(tmp_path / name / "1", streaming_lines(3), f"trainer:\n  seed: {seed}\n  name: x\n", {"torch": "2.13"})
        )
        for seed, name in enumerate(("fast", "slow"))
    ]
    text = re.sub(r"\s+", " ", Page(write_report(runs, tmp_path / "report.html")).text)
    assert "Settings: differences settings fast slow trainer.seed 0 1" in text
    assert "Environment: differences None: they are the same in all runs." in text


def test_an_old_report_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    """Whoever looks at a run while it goes on makes the report again and again."""
    run = read_run(write_run(tmp_path / "1", [update(1)]))
    output = tmp_path / "report.html"
    output.write_text("old")
    write_report([run], output)
    assert output.read_text().rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "report.html"]


@pytest.mark.parametrize("count", [0, MAX_RUNS + 1])
def test_no_run_and_too_many_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_RUNS} runs"):
        write_report([RunData(tmp_path, [], [])] * count, tmp_path / "report.html")
