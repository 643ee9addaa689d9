"""``LiveArea``: the lowest lines of a terminal, drawn by rich; what others print meanwhile goes above them."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment

from vla_async.monitor.live import LiveState, render

_NEWEST = 3  # warnings that are shown


def terminal() -> Console | None:
    """The terminal that standard output is; None if it is none, or one that cannot go back to an earlier line."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    draws = sys.stdout.isatty() and console.is_interactive and console.encoding.startswith("utf")
    return console if draws else None


class LiveArea:
    """Draws a :class:`LiveState` again and again in the same place. A context manager: it is drawn while that is open.

    Whatever ends it, the terminal has its cursor and its streams again, and the last drawing stays to be read. Warnings of
    Python that come meanwhile are printed as ever, and the newest of them are shown.

    Args:
        console: from :func:`terminal`.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        # what goes to another place than this terminal stays there
        self._live = _Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        self._noted: deque[str] = deque(maxlen=_NEWEST)
        self._num_noted = 0
        self._open = ExitStack()

    def __enter__(self) -> LiveArea:
        with ExitStack() as stack:
            stack.enter_context(_told_of_warnings(self._note))
            stack.callback(self._live.stop)
            self._live.start()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def draw(self, state: LiveState) -> None:
        """Draw a state, as large as the terminal is now. From one thread at a time."""
        size = self.console.size
        width = max(1, size.width - 1)  # behind a last column that is full, terminals disagree about where the cursor is
        state = replace(state, warnings=tuple(self._noted), num_warnings=self._num_noted)
        view = render(state, width, size.height - 1)
        lines = self.console.render_lines(view, self.console.options.update_width(width), pad=False)
        self._live.show(_Drawing([*lines, []]))  # what is typed, as the ^C of an interrupt, goes to an empty line

    def _note(self, text: str) -> None:
        self._noted.append(" ".join(text.split()))
        self._num_noted += 1


class _Drawing:
    """Finished lines, so that each print of others costs little: they are drawn again below it."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()

    def rows_more(self, drawn: int, width: int) -> int:
        """By how many rows it grew that was drawn ``drawn`` columns wide, in a terminal that is now ``width`` wide."""
        lengths = [min(Segment.get_line_length(line), drawn) for line in self.lines]
        return sum(max(0, -(-length // width) - 1) for length in lengths)


class _Live(Live):
    """rich's, which would go up too few rows to its first line where a terminal became narrower, and wrapped the lines."""

    _drawn, _width = _Drawing([]), 0

    def show(self, drawing: _Drawing) -> None:
        self.update(drawing, refresh=True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width, current = self.console.width, self.get_renderable()
        more = self._drawn.rows_more(self._width, width) if width < self._width else 0
        processed = super().process_renderables(renderables)
        self._drawn, self._width = current if isinstance(current, _Drawing) else self._drawn, width
        return [Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * more), *processed]


@contextmanager
def _told_of_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` with the text of each warning that Python shows."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        note(str(message))
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown
