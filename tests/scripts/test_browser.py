"""The script that looks for a browser, without touching this machine's packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("browser")


@pytest.fixture
def commands(browser: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of an apt that knows Debian's packages, on a machine without a browser."""
    asked: list[str] = []
    monkeypatch.setattr(browser.shutil, "which", lambda name: name if name == "apt-get" else None)
    monkeypatch.setattr(browser, "candidate", lambda package: "156.0")
    monkeypatch.setattr(browser, "apt_get", lambda *arguments: asked.append(" ".join(arguments)))
    return asked


def test_the_smallest_browser_is_installed(browser: ModuleType, commands: list[str]) -> None:
    assert browser.main() == 0
    assert commands == ["update", "install -y --no-install-recommends chromium-headless-shell"]


def test_a_browser_that_is_there_is_taken(browser: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything in place `make test` asks nothing of the network."""
    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/bin/{name}" if name == "google-chrome" else None)
    assert browser.find_browser() == "/bin/google-chrome"
    assert browser.main() == 0
    assert commands == []


def test_without_a_package_the_other_tests_still_run(
    browser: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the report's tests need a browser: whoever cannot install one must not be kept from all others."""
    monkeypatch.setattr(browser, "candidate", lambda package: "")
    assert browser.main() == 0
    message = capsys.readouterr().err
    assert "apt has no Chromium here" in message
    assert "google-chrome" in message
