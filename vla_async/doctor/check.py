"""``Check``: one thing that was looked at, and how all of them are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from vla_async import __version__

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "warn", "fail"]
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        name: of what was looked at.
        status: ``ok``; ``warn``: it works, but something is to be known; ``fail``: it does not.
        found: what was found, in words.
        fix: what to do about it: a command, a setting, or what to ask an administrator for. Empty where all is well.
        needed: whether a run cannot do without: a run of the recipe, if there is one.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    needed: bool = True

    @property
    def blocks(self) -> bool:
        """Whether nothing runs before this is mended."""
        return self.needed and self.status == "fail"


def to_json(checks: Sequence[Check], recipe: str | None) -> dict[str, Any]:
    """All checks as plain values."""
    return {
        "vla_async": __version__,
        "recipe": recipe,
        "can_run": not any(check.blocks for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def to_table(checks: Sequence[Check]) -> Table:
    """All checks for a terminal: a line each, and below it what to do."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("looked at", overflow="fold")
    table.add_column("found", overflow="fold", ratio=1)
    for check in checks:
        found = Text(check.found)
        if check.fix:
            found.append("\n→ ", style="bold").append(check.fix, style="italic")
        table.add_row(Text(check.status, style=_COLOURS[check.status]), Text(check.name), found)
    return table


def verdict(checks: Sequence[Check], recipe: str | None) -> str:
    """The last line: what follows from all of them."""
    blocking = [check.name for check in checks if check.blocks]
    what = "a run" if recipe is None else recipe
    if blocking:
        return f"{what} cannot start here before these are mended: {', '.join(blocking)}"
    others = [check.name for check in checks if check.status == "fail"]
    return f"{what} can start here" + (f"; what needs one of these cannot: {', '.join(others)}" if others else "")
