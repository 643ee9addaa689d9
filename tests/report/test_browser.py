"""The report in a real browser, without a network: as a desktop and as a phone show it, light and dark."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes import wait_until
from tests.report.runs import COMMAND, step_events, streaming_lines, write_run
from tests.report.test_page import HOSTILE
from vla_async.monitor.video import write_video
from vla_async.report.page import write_report
from vla_async.report.run_data import read_run

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@dataclass
class Shown:
    """A page, and what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def drawn(self, theme: str) -> None:
        """Wait until all charts are drawn in a theme."""
        self.page.wait_for_selector(f"html[data-drawn={theme}]", state="attached")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        program = importlib.import_module("browser").find_browser()
    if program is None and not os.environ.get("CI"):
        pytest.skip("no browser: python3 scripts/browser.py says which would do")
    options = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", *options, "--disable-component-update"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of one run with all that a run can leave, and one that compares it with another."""
    root = tmp_path_factory.mktemp("report")
    config = f"# {COMMAND}\ntrainer:\n  name: toy\n  seed: 0\n"
    tasks = ("pick up the black bowl between the plate and the ramekin and place it on the plate", HOSTILE)
    lines = streaming_lines(60, tasks=tasks)
    events = step_events([3.0, 1.4, 1.5, 1.6, 1.3])
    one = write_run(root / "async" / "1", lines, config, {"python": "3.11", "cpu": {"model": "x", "cores": 2}}, events)
    frames = [torch.full((64, 64, 3), 4 * shade, dtype=torch.uint8) for shade in range(40)]
    write_video(one / "videos" / "validate_000060_push_7_success.mp4", frames)
    (one / "trajectories" / "push").mkdir(parents=True)
    (one / "trajectories" / "push" / "train_000040_5_failure.pt").touch()
    write_video(one / "trajectories" / "push" / "train_000040_5_failure.mp4", frames)
    other = write_run(root / "sync" / "1", streaming_lines(60, pace=0.6), config.replace("seed: 0", "seed: 1"))
    runs = [read_run(one), read_run(other)]
    return {"one": write_report(runs[:1], root / "one.html"), "two": write_report(runs, root / "two.html")}


@contextmanager
def show(browser: Browser, report: Path, size: str, **options: Any) -> Iterator[Shown]:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
    shown = Shown(context.new_page())
    shown.page.on("console", lambda said: said.type in ("error", "warning") and shown.problems.append(said.text))
    shown.page.on("pageerror", lambda error: shown.problems.append(str(error)))
    shown.page.on("request", lambda asked: asked.url.startswith("http") and shown.problems.append(f"asks for {asked.url}"))
    shown.page.goto(report.as_uri())
    shown.drawn("light")
    try:
        yield shown
    finally:
        context.close()


@pytest.fixture(scope="module")
def shown(request: pytest.FixtureRequest, browser: Browser, reports: dict[str, Path]) -> Iterator[Shown]:
    report, size = request.param.split("-")
    with show(browser, reports[report], size, is_mobile=size == "phone", has_touch=size == "phone") as shown:
        yield shown


on = partial(pytest.mark.parametrize, "shown", indirect=True)


@on(["one-desktop", "one-phone", "two-desktop", "two-phone"])
def test_every_chart_is_drawn_and_fits(shown: Shown) -> None:
    """A chart that fails to draw, or one that is wider than the screen, is what users would see first."""
    counts = shown.page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => ({
            title: plot.getAttribute("aria-label"),
            marks: plot.querySelectorAll(".scatterlayer path, .barlayer path, .heatmaplayer image").length,
            width: plot.querySelector("svg.main-svg")?.getBoundingClientRect().width ?? 0,
            room: plot.clientWidth,
        }))"""
    )
    assert len(counts) >= 30
    assert [plot["title"] for plot in counts if plot["marks"] == 0] == []
    assert [plot["title"] for plot in counts if not 0 < plot["width"] <= plot["room"] + 1] == []
    assert shown.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert shown.problems == []


@on(["one-desktop", "two-phone"])
def test_what_a_run_holds_does_not_run(shown: Shown) -> None:
    assert shown.page.evaluate("window.hacked") is None
    assert HOSTILE in shown.page.locator("#tasks").inner_text()


@on(["one-phone", "two-desktop"])
def test_findings_and_their_rules_can_be_read(shown: Shown) -> None:
    finding = shown.page.locator(".finding").first
    assert finding.is_visible()
    assert len(finding.locator("p").inner_text()) > 20
    rule = finding.locator("details")
    if rule.count():
        rule.locator("summary").click()
        assert rule.locator("code").is_visible()


@on(["two-phone"])
def test_the_theme_can_be_switched(shown: Shown) -> None:
    """Charts take their colours when they are drawn, so all of them have to be drawn again."""

    def colours() -> list[str]:
        return [
            shown.page.evaluate("getComputedStyle(document.body).backgroundColor"),
            shown.page.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill"),
        ]

    light = colours()
    shown.page.click("#theme")
    shown.drawn("dark")
    assert all(a != b for a, b in zip(light, colours(), strict=True))


@on(["one-desktop"])
def test_the_axis_can_be_chosen(shown: Shown) -> None:
    title = shown.page.locator("#speed .plot .xtitle").first
    expect(title).to_have_text("env steps")
    shown.page.locator("#speed [data-axis=elapsed_s]").click()
    expect(title).to_have_text("training time (s)")


@on(["one-phone"])
def test_videos_can_be_played(shown: Shown) -> None:
    """The browser has read how long the videos are, and can decode them."""
    read = "[...document.querySelectorAll('video')].map((it) => [it.readyState > 0, Math.round(it.duration), it.videoWidth])"
    wait_until(lambda: shown.page.evaluate(read) == [[True, 2, 64]] * 2, "the videos to be read")


@on(["two-desktop"])
def test_a_run_can_be_hidden(shown: Shown) -> None:
    lines = "document.querySelectorAll('#speed .plot .scatterlayer .trace').length"
    both = shown.page.evaluate(lines)
    shown.page.click("[data-run='1']")
    wait_until(lambda: shown.page.evaluate(lines) < both, "the lines of a run to disappear")
    assert shown.page.get_attribute("[data-run='1']", "aria-pressed") == "false"


@on(["one-desktop"])
def test_the_theme_of_the_system_is_followed(shown: Shown) -> None:
    """As long as the reader has not chosen one."""
    shown.page.emulate_media(color_scheme="dark")
    shown.drawn("dark")
