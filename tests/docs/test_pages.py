"""The documentation builds without a warning, and its lists are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """A broken link, an unknown reference or a docstring that does not parse is an error."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path / "html"),
    ]
    result = subprocess.run([*command, "-d", str(tmp_path / "doctrees")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (tmp_path / "html" / "quickstart.html").is_file()


def test_every_recipe_has_its_place_on_the_page() -> None:
    """Whoever adds or removes a recipe tells the reader."""
    named = set(re.findall(r"recipes/(\w+\.yaml)", (ROOT / "docs" / "recipes.md").read_text()))
    assert named == {path.name for path in (ROOT / "recipes").glob("*.yaml")}


def test_every_behaviour_that_the_page_promises_has_its_test() -> None:
    """Each behaviour of the table has a test beside it; if that is renamed or deleted, the table is a mere promise."""
    page = (ROOT / "docs" / "use_in_torchrl.md").read_text()
    table = page[page.index("## The behaviours, and the test of each") :]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", table)
    assert len(named) >= 12, "the table is not found any more"
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert not missing
