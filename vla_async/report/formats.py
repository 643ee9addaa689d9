"""Numbers as people read them."""

from __future__ import annotations

import math

NOTHING = "–"


def number_text(value: float, digits: int = 3) -> str:
    """For example ``40,316``, ``621``, ``0.62``; a dash for what is not known."""
    if not math.isfinite(value):
        return NOTHING
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def rate_text(rate: float) -> str:
    """A success rate, for example ``0.97``."""
    return f"{rate:.2f}" if math.isfinite(rate) else NOTHING


def seconds_text(seconds: float) -> str:
    """A duration, for example ``4.2 ms``, ``4.2 s``, ``3:07 min``, ``1:03 h``."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02} h" if hours else f"{minutes}:{rest:02} min"


def size_text(size: float) -> str:
    """A file's size, for example ``4.2 MB``."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
