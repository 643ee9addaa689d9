"""Look for a browser that the report's tests can drive without a screen, and install one where apt has it.

    python3 scripts/browser.py

The exit status is 0 either way: without a browser these tests are skipped, and nothing else misses it.
"""

from __future__ import annotations

import shutil
import sys

from system_libraries import SetupError, apt_get, candidate

# by what they are called in PATH, the smallest first
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium-headless-shell", "chromium")  # Debian's; Ubuntu's are snaps, which do not run everywhere


def find_browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def install() -> None:
    """Install the smallest one that apt has.

    Raises:
        SetupError: if it has none, or cannot install it from here.
    """
    if shutil.which("apt-get") is None:
        raise SetupError("there is no apt-get here")
    apt_get("update")
    package = next(filter(candidate, PACKAGES), None)
    if package is None:
        raise SetupError("apt has no Chromium here")
    apt_get("install", "-y", "--no-install-recommends", package)


def main() -> int:
    """Look, and install what is missing."""
    if find_browser() is None:
        try:
            install()
        except SetupError as error:
            print(f"no browser for the report's tests, which are skipped: {error}.", file=sys.stderr)
            print(f"One of these in PATH is enough: {', '.join(PROGRAMS)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
