"""Every code block of the documentation runs, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.code_blocks import LANGUAGES, Block, code_blocks

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"] if path.is_file())
RUNNABLE = [page for page in PAGES if any(block.language != "text" and not block.not_run for block in code_blocks(page))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone: what a page needs is there, runs are not."""
    for name in ("recipes", "examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


class Runner:
    """A process that runs pages one after the other: importing everything is what takes long."""

    def __init__(self, log: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.log = log
        with log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "docs" / "code_blocks.py")],
                cwd=log.parent,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def problem(self, page: Path, folder: Path) -> str | None:
        """Run a page; what went wrong, with all that it said before."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        start = self.log.stat().st_size
        print(json.dumps([str(page), str(folder)]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        problem = json.loads(answer) if answer else f"the process ended (exit code {self.process.wait()})"
        return None if problem is None else self.log.read_bytes()[start:].decode()[-6000:] + problem


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("pages") / "log")
    yield runner
    runner.process.communicate(timeout=60)
    assert runner.process.returncode == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_all_blocks_of_a_page_run(page: Path, folder: Path, runner: Runner) -> None:
    """A reader who follows the page from top to bottom meets no error."""
    problem = runner.problem(page, folder)
    assert problem is None, problem


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A fence without a known language, or a left-out block without a reason, would silently not be tested."""
    for block in code_blocks(page):
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: give the fence one of the languages {LANGUAGES}"
        assert block.not_run is None or len(block.not_run) > 10, f"{page.name}:{block.line}: say why it is not run"


def test_only_what_cannot_run_here_is_left_out() -> None:
    """Blocks that install something, take minutes or want released weights are left out, and no others."""
    allowed = (
        "make ",
        "pip install",
        "apt-get",
        "git clone",
        "recipes/maniskill",
        "recipes/libero",
        "examples/demo.py",
        "benchmarks.",
        "pretrained: lerobot/",
        "vla-async export",
        "lerobot.policies.factory",
        "WandbLogger",
        "scrape_configs:",
    )
    for page in PAGES:
        for block in code_blocks(page):
            if block.not_run is not None:
                assert any(word in block.source for word in allowed), f"{page.name}:{block.line} could be run"


def test_the_documentation_has_code() -> None:
    """Guards the guards: if blocks were no longer found, the tests above would pass on nothing."""
    assert {"add_env.md", "add_a_policy.md", "quickstart.md", "recipes.md", "use_in_torchrl.md", "batching.md"} <= {
        page.name for page in RUNNABLE
    }


PAGE = """\
Words.

```python
answer = 6 * 7
```

```{code-block} python
:caption: module.py

VALUE = 42
```

<!-- not run: it installs something -->
```bash
pip install nothing
```

```{note}
This is no code.
```

```bash
test -f module.py
```

```python
from module import VALUE
assert VALUE == answer
```
"""


def test_blocks_are_found_with_their_lines_and_files(tmp_path: Path, runner: Runner) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert code_blocks(page) == [
        Block("python", "answer = 6 * 7\n", 4),
        Block("python", "VALUE = 42\n", 10, file="module.py"),
        Block("bash", "pip install nothing\n", 15, not_run="it installs something"),
        Block("bash", "test -f module.py\n", 23),
        Block("python", "from module import VALUE\nassert VALUE == answer\n", 27),
    ]
    assert runner.problem(page, tmp_path) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nassert 1 == 2\n```\n",
        "```bash\nfalse\ntrue\n```\n",
        "```bash\nvla-async fit --config recipes/toy_ppo.yaml --trainer.max_stepz 3\n```\n",
        "```yaml\ntrainer:\n  max_stepz: 3\n```\n",
    ],
    ids=["python", "bash", "command", "yaml"],
)
def test_a_wrong_block_fails(wrong: str, folder: Path, runner: Runner) -> None:
    """A page whose code has rotted must not pass."""
    page = folder / "page.md"
    page.write_text(wrong)
    assert runner.problem(page, folder) is not None
