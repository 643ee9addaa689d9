"""The lowest lines of a terminal: what others print stays whole, and the terminal is given back."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

from vla_async.monitor.live import LiveState
from vla_async.monitor.live_area import LiveArea, terminal

STATE = LiveState(("step 3/10",), 1.0, 0.3, title="x" * 60)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def of_xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def opened(monkeypatch: pytest.MonkeyPatch, errors: io.StringIO | None = None) -> tuple[LiveArea, Terminal]:
    """An area, and the terminal that it draws on, which is standard output now."""
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal() if errors is None else errors)
    console = terminal()
    assert console is not None
    return LiveArea(console), screen


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_that_cannot_go_back_is_not_drawn_on(monkeypatch, name):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert terminal() is not None
    monkeypatch.setenv("TERM", name)
    assert terminal() is None


def test_a_file_is_not_drawn_on_even_if_colours_are_forced(monkeypatch):
    """CI sets FORCE_COLOR for coloured logs; cursor movements have no place there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal() is None


def test_a_terminal_that_knows_no_blocks_is_not_drawn_on(monkeypatch):
    class Latin(Terminal):
        encoding = "iso-8859-1"

    monkeypatch.setattr(sys, "stdout", Latin())
    assert terminal() is None


def test_what_others_print_goes_above_as_it_is(monkeypatch):
    """Brackets are no markup, and the view is drawn again below."""
    area, screen = opened(monkeypatch)
    with area:
        area.draw(STATE)
        before = len(screen.getvalue())
        print("success_once 0.80 [bold][0.49, 0.94] n=10")
        after = screen.getvalue()[before:]
    assert "success_once 0.80 [bold][0.49, 0.94] n=10\n" in after
    assert after.index("n=10") < after.index("step 3/10")


def test_what_is_typed_goes_to_an_empty_line(monkeypatch):
    """A terminal shows ^C where the cursor is: at the end of a full line it would wrap, and shift what is drawn next."""
    area, screen = opened(monkeypatch)
    with area:
        area.draw(STATE)
        assert screen.getvalue().endswith("\n")


def test_the_last_drawing_stays_and_the_terminal_is_given_back_after_an_error(monkeypatch):
    area, screen = opened(monkeypatch)
    errors, shown = sys.stderr, warnings.showwarning

    def interrupted() -> None:
        with area:
            area.draw(STATE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    drawn = screen.getvalue()
    assert "step 3/10" in drawn[drawn.rindex("x" * 60) :]
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    assert (sys.stdout, sys.stderr, warnings.showwarning) == (screen, errors, shown)


def test_warnings_are_printed_and_the_newest_are_shown(monkeypatch):
    area, screen = opened(monkeypatch)
    # what Python does where pytest does not record them
    monkeypatch.setattr(warnings, "showwarning", lambda message, *place: print(f"warning: {message}", file=sys.stderr))
    with warnings.catch_warnings(), area:
        warnings.simplefilter("always")
        for number in range(1, 5):
            warnings.warn(f"number {number}\nis odd", stacklevel=1)
        area.draw(STATE)
    drawn = screen.getvalue()
    assert "warning: number 1\n" in drawn
    assert "4 warnings" in drawn
    assert "number 4 is odd" in drawn
    assert "number 1 is odd" not in drawn


def test_errors_that_go_to_a_file_still_go_there(monkeypatch):
    """``vla-async fit 2> errors.log``: rich would take them to the terminal."""
    area, screen = opened(monkeypatch, log := io.StringIO())
    with area:
        area.draw(STATE)
        print("an error", file=sys.stderr)
    assert log.getvalue() == "an error\n"
    assert "an error" not in screen.getvalue()


def test_in_a_terminal_that_became_narrower_the_wrapped_lines_are_erased_too(monkeypatch):
    """The title of 60 columns and the bar of 100 take two rows more where a row has 50 columns."""

    def rows_up(drawn: str) -> int:
        return drawn.count("\x1b[1A")

    area, screen = opened(monkeypatch)
    with area:
        area.draw(STATE)
        for width, more in (("100", 0), ("50", 2), ("50", 0)):
            monkeypatch.setenv("COLUMNS", width)
            area.console._width = int(width)
            before = len(screen.getvalue())
            area.draw(STATE)
            assert rows_up(screen.getvalue()[before:]) == 3 + more
