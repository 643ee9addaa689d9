"""Code blocks of Markdown pages: find them, and run those of one page in the order of the page.

What becomes of a block depends on its language:

- ``python`` runs; the blocks of a page share their names. ``{code-block} python`` with a ``:caption:`` is a module: it is
  written to the file that the caption names, and imported.
- ``bash`` runs, in the same folder.
- ``yaml`` is part of a recipe: it must be accepted on top of ``recipes/toy_ppo.yaml``. With a caption it is a whole recipe,
  and is written to that file.
- ``text`` is output or a layout.

``<!-- not run: reason -->`` on the line above a fence leaves a block out.

Run as a program, ``python code_blocks.py PAGE`` executes the blocks of a page in the current folder.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("bash", "python", "text", "yaml")
_OPENING = re.compile(r"^(?P<fence>`{3,})(?P<info>.*)$")
_NOT_RUN = re.compile(r"<!-- not run:\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: what stands after the fence.
        source: the code.
        line: line of the page on which the code starts, from 1.
        file: name in the caption, if it has one.
        not_run: why it is left out, if it is.
    """

    language: str
    source: str
    line: int
    file: str | None = None
    not_run: str | None = None


def code_blocks(page: Path) -> list[Block]:
    """The blocks of a page. Directives other than ``code-block`` are no code."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    position = 0
    while position < len(lines):
        opening = _OPENING.match(lines[position])
        position += 1
        if opening is None:
            continue
        above = _NOT_RUN.search(lines[position - 2]) if position >= 2 else None
        start = position
        while lines[position].rstrip() != opening["fence"]:
            position += 1
        body, info = lines[start:position], opening["info"].strip()
        position += 1
        if info.startswith("{") and not info.startswith("{code-block}"):
            continue
        file = None
        while info.startswith("{") and body and (body[0].startswith(":") or not body[0]):
            if body[0].startswith(":caption:"):
                file = body[0].removeprefix(":caption:").strip()
            body, start = body[1:], start + 1
        language = info.removeprefix("{code-block}").strip()
        blocks.append(Block(language, "\n".join(body) + "\n", start + 1, file, above["reason"] if above else None))
    return blocks


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    """Execute in the names of the page; a traceback shows the page's own lines."""
    exec(compile("\n" * (block.line - 1) + block.source, str(page), "exec"), names)


def run_bash(block: Block) -> None:
    """Execute; the first command that fails ends the block."""
    subprocess.run(["bash", "-euo", "pipefail", "-c", block.source], check=True)


def check_recipe(block: Block) -> None:
    """See that the command line takes a part of a recipe, or a whole one if the block has a file.

    Raises:
        ValueError: if it does not.
    """
    from vla_async.cli import VLACLI

    file = Path(block.file or "part-of-a-recipe.yaml")
    file.write_text(block.source, encoding="utf-8")
    stacked = [] if block.file else ["--config", "recipes/toy_ppo.yaml"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        VLACLI(["fit", *stacked, "--config", str(file), "--print_config"])
    if "trainer:" not in printed.getvalue():
        raise ValueError(f"--print_config printed no configuration:\n{printed.getvalue()}")


def run_page(page: Path) -> None:
    """Run all blocks of a page here."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in code_blocks(page):
        if block.not_run is not None or block.language == "text":
            continue
        print(f"--- {page.name}:{block.line} {block.language}", flush=True)
        if block.file is not None:
            Path(block.file).write_text(block.source, encoding="utf-8")
        if block.language == "python" and block.file is not None:
            importlib.import_module(block.file.removesuffix(".py"))
        elif block.language == "python":
            run_python(block, page, names)
        elif block.language == "bash":
            run_bash(block)
        else:
            check_recipe(block)


if __name__ == "__main__":
    sys.path.insert(0, "")  # files that the page writes can be imported
    run_page(Path(sys.argv[1]))
