"""``vla-async report``: where the file goes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.runs import update, write_run
from vla_async.__main__ import main
from vla_async.refusals import ConfigError
from vla_async.report.command import report


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs" / "toy" / "1", [update(1), update(2)])


def test_the_report_is_written_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "toy"]) == 0
    assert (run / "report.html").stat().st_size > 1e6  # the charts' library is inside
    assert "report: runs/toy/1/report.html (" in capsys.readouterr().out


def test_a_run_that_is_given_twice_is_drawn_once(run: Path) -> None:
    report(["toy", "runs/toy/1", "--output", "both.html", "--max-video-mb", "0"])
    assert "2 runs" not in Path("both.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "RUN"),
        (["toi"], "no run in toi nor runs/toi.*\n  runs below runs: toy"),
        (["toy", "--output", "runs"], "runs is a directory; give a file in it"),
        (["toy", "--output", "nowhere/report.html"], "there is no directory"),
        (["toy", "--max-video-mb", "-1"], "a number of MB, 0 or more"),
        (["toy", "--out", "x.html"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Path, args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        report(args)


def test_more_runs_than_colours_are_refused(run: Path) -> None:
    names = [str(write_run(Path("runs") / f"r{number}" / "1", [update(1)])) for number in range(9)]
    with pytest.raises(ConfigError, match="these are 9 runs; give at most 8"):
        report(names)
