"""Every code block and command of the README and the documentation runs as it stands there.

A block that opens with a comment naming a file is that file; other Python blocks of a page run one
after another in one namespace, with the repository's examples beside them. In console blocks each
`$ autopar` line is run, and the lines below it are what it must print, in order and figure by
figure, but for spacing. `...` is any lines, and within a line any text: what moves from run to run.
`pytest tests/docs --docs-update` writes the figures that are printed now into the pages. In `sh`
blocks are commands that need what is not here: a compiler, minutes, several hosts. Those of
autopar must be called as they can be.
"""

import functools
import importlib
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from tests.cli.running import Ran, run
from tests.house.source import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line of its first line."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


WITH_BLOCKS = [page for page in PAGES if any(blocks_of(page))]


# Pages that plan for clusters again and again take as long as all the others.
LONG = ("pipelines.md", "gpu-clusters.md", "tpu-pods.md", "verify-a-plan.md")
# Of the others, those that take longest; what they show has tests of its own.
IN_CI = (
    "first-plan.md", "README.md", "checkpoints.md", "mixture-of-experts.md", "launch.md",
    "read-a-report.md",
)  # fmt: skip


def _marks(page: str) -> list[pytest.MarkDecorator]:
    if page in IN_CI:
        return [pytest.mark.ci]
    return [pytest.mark.slow] if page in LONG else []


RUN = [
    pytest.param(
        page,
        id=page.relative_to(ROOT).as_posix(),
        marks=_marks(page.name),
    )
    for page in WITH_BLOCKS
]


@pytest.fixture
def log_as_it_was() -> Iterator[None]:
    """A page may set the level of autopar's log; others must not be told of it."""
    logger = logging.getLogger("autopar")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("page", RUN)
@pytest.mark.usefixtures("folder_of_a_reader", "log_as_it_was")
def test_the_blocks_of_a_page_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    stale: list[Stale] = []
    for block in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if named := _FILE.match(block.text):
            Path(named[1]).write_text(block.text, encoding="utf-8")
            # Another page may have a file of this name, and may have imported it.
            monkeypatch.delitem(sys.modules, Path(named[1]).stem, raising=False)
            importlib.invalidate_caches()
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec"), names)
        elif block.language == "console":
            stale += _run_console(block, where)
    if stale and request.config.getoption("--docs-update", default=False):
        _update(page, stale)
    elif stale:
        told = "\n".join(f"{s.line}: {s.old.strip()}\n  now: {s.new}" for s in stale)
        pytest.fail(f"{page.relative_to(ROOT)}: pytest tests/docs --docs-update writes\n{told}")


@dataclass(frozen=True)
class Stale:
    """A line of a page that is printed with other figures now."""

    line: int
    old: str
    new: str


def _run_console(block: Block, where: str) -> Iterator[Stale]:
    """Run the commands of a block; the lines whose figures alone have changed."""
    commands = block.text.split("$ autopar ")
    number = block.line + commands[0].count("\n")
    for command in commands[1:]:
        line, *expected = command.rstrip().splitlines()
        done = _planned(line) if _is_shown_alone(line) else run(*shlex.split(line))
        fails = bool(expected) and expected[0].startswith("error:")
        assert (done.code != 0) == fails, f"{where}: {line}\n{done.err}"
        shown = (done.err if fails else done.out).splitlines()
        for offset, text in enumerate(expected, 1):
            if text.strip() == "...":
                continue
            at = _first(shown, _pattern(text, re.escape))
            if at is None:
                at = _first(shown, _pattern(text, _any_figures))
                assert at is not None, f"{where}: {line!r} no longer prints {text!r}"
                yield Stale(number + offset, text, " ".join(shown[at].split()))
            shown = shown[at + 1 :]
        number += command.count("\n")


def _is_shown_alone(line: str) -> bool:
    """True of a plan that no other command goes on with and no file of the page changes."""
    return line.startswith("plan examples/") and " -o " not in line and ".toml" not in line


@functools.cache
def _planned(line: str) -> Ran:
    return run(*shlex.split(line))


def _first(shown: Sequence[str], pattern: re.Pattern[str]) -> int | None:
    """The first line that has the pattern in it."""
    found = (i for i, line in enumerate(shown) if pattern.search(" ".join(line.split())))
    return next(found, None)


def _pattern(text: str, plain: Callable[[str], str]) -> re.Pattern[str]:
    """A line of a page as a pattern; `...` in it is any text."""
    return re.compile(".*".join(plain(part) for part in " ".join(text.split()).split("...")))


def _any_figures(text: str) -> str:
    return r"[\d.]+".join(re.escape(part) for part in re.split(r"[\d.]+", text))


def _update(page: Path, stale: Sequence[Stale]) -> None:
    """Write the figures that are printed now into a page, each where the old one stood."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for s in stale:
        found = _pattern(s.old, _any_figures).search(s.new)
        assert found is not None
        figures = re.findall(r"[\d.]+", found[0])
        assert "..." not in s.old, f"{page}:{s.line}: mend it by hand: {s.new}"
        kept = re.split(r"[\d.]+", lines[s.line - 1])
        lines[s.line - 1] = "".join(chain.from_iterable(zip_longest(kept, figures, fillvalue="")))
    page.write_text("".join(lines), encoding="utf-8")


def test_commands_that_are_not_run_can_be_called_so() -> None:
    shown = [block.text for page in PAGES for block in blocks_of(page) if block.language == "sh"]
    lines = [line for text in shown for line in text.splitlines() if line.startswith("autopar ")]
    assert lines
    for line in lines:
        _, name, *words = shlex.split(line, comments=True)
        main.commands[name].make_context(name, words)


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert not broken, broken
