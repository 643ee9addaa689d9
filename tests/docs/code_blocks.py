"""Code blocks of Markdown pages: find them, and run those of one page in the order of the page.

What becomes of a block depends on its language:

- ``python`` runs; the blocks of a page share their names. ``{code-block} python`` with a ``:caption:`` is a module: it is
  written to the file that the caption names, and imported.
- ``bash`` runs, in the same folder; a command line of ``vla-async`` alone in this process, which has imported everything.
- ``yaml`` is part of a recipe: it must be accepted on top of ``recipes/toy_ppo.yaml``. With a caption it is a whole recipe,
  and is written to that file.
- ``text`` is output or a layout.

``<!-- not run: reason -->`` on the line above a fence leaves a block out.

Run as a program, it reads a page and a folder per line (as JSON), executes the blocks of the page in the folder, and answers
with a line: null, or the traceback. What the blocks print goes to stderr.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
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
    for line in block.source.replace("\\\n", " ").splitlines():
        if not line.startswith("vla-async ") or re.search(r"[|&;<>$`]|num_ranks", line):  # ranks run their command again
            subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)
        elif run_command_line(line):
            raise ValueError(f"it failed: {line}")


def run_command_line(line: str) -> int:
    """Run a line of ``vla-async`` here; returns its exit code."""
    from vla_async.__main__ import main

    _, *words = shlex.split(line, comments=True)
    found = [sorted(glob.glob(word)) if "*" in word else [word] for word in words]
    try:
        return main([word for words in found for word in words])
    except SystemExit as end:  # of --help
        return int(end.code or 0)


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


def serve() -> None:
    """Run the pages that are asked for, one after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the blocks print
    for line in sys.stdin:
        page, folder = json.loads(line)
        os.chdir(folder)
        sys.path.insert(0, folder)  # files that the page writes can be imported
        before, problem = set(sys.modules), None
        try:
            run_page(Path(page))
        except BaseException:  # noqa: BLE001 - whatever it is, the next page is run all the same
            problem = traceback.format_exc()
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]  # another page may have a module of the same name
        print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    serve()
