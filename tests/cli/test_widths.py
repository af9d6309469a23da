"""Every view of a plan on narrow and wide terminals, in a pipe, and on terminals of all kinds."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from autopar.cli.main import main
from autopar.ir.text import show_bytes, show_count, show_seconds
from tests.cli.running import run, written

AUTOPAR = Path(sys.executable).with_name("autopar")
VIEWS = ("", "--params", "--ops", "--stages", "--comm", "--memory")
CUTS = {"one": ("--mesh", "2,4"), "staged": ("--stages", "2", "--microbatches", "4")}
FIGURE = re.compile(r"\d[\d.]* (?:[KMG]iB|B|ns|us|ms|s|[kMGT]?FLOP)(?![\w/])")
DRAWN = re.compile(r"(device \d|[num]?s  )")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan of one program, and one of two stages."""
    folder = tmp_path_factory.mktemp("widths")
    target = f"{written(folder)}:train_step"
    for name, words in CUTS.items():
        done = run("plan", target, "--cluster", "8xcpu", *words, "-o", folder / f"{name}.json")
        assert done.code == 0, done.err
    return {name: folder / f"{name}.json" for name in CUTS}


def shown(plan: Path, view: str, columns: int) -> str:
    words = ["show", str(plan), *([view, "--all"] if view else [])]
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, words)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def figures(text: str) -> set[str]:
    """Numbers with their units, but for those of a drawing along an axis."""
    lines = (line for line in text.splitlines() if not DRAWN.match(line))
    return set(FIGURE.findall(" ".join(" ".join(lines).split())))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CUTS)
def test_no_line_is_too_wide_and_no_figure_is_lost(
    plans: dict[str, Path], name: str, view: str
) -> None:
    texts = {columns: shown(plans[name], view, columns) for columns in (60, 80, 160)}
    for columns, text in texts.items():
        assert max(map(cell_len, text.splitlines())) <= columns
        assert "\x1b" not in text
        assert "…" not in text
        assert figures(text) == figures(texts[160])
    assert figures(texts[160])


@pytest.mark.parametrize("name", CUTS)
def test_every_figure_is_in_the_json(plans: dict[str, Path], name: str) -> None:
    text = run("show", plans[name], "--json").out
    numbers = [n for n in _leaves(json.loads(text)) if not isinstance(n, str)]
    known = {show(n) for n in numbers for show in (show_bytes, show_seconds, _flops)}
    for view in VIEWS:
        for figure in figures(shown(plans[name], view, 160)):
            assert figure in known or figure in text, f"{view}: {figure}"


def _flops(count: float) -> str:
    return show_count(count, "FLOP")


def _leaves(data: object) -> Iterator[float | str]:
    if isinstance(data, dict):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list):
        for value in data:
            yield from _leaves(value)
    elif isinstance(data, int | float | str) and not isinstance(data, bool):
        yield data


@pytest.mark.parametrize(
    ("setting", "colored"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
    ids=["terminal", "NO_COLOR", "dumb"],
)
def test_terminals_have_color_unless_it_is_not_wanted(
    setting: dict[str, str], colored: bool
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "LINES")}
    text = _on_a_terminal({**kept, **setting, "COLUMNS": "60"})
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", text)) == colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "8xh100" in plain
    assert 50 < max(map(cell_len, plain.splitlines())) <= 60


def _on_a_terminal(env: dict[str, str]) -> str:
    """What `autopar clusters 8xh100` writes on a terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen([AUTOPAR, "clusters", "8xh100"], stdout=slave, env=env):
        os.close(slave)
        found = b""
        while part := _read(master):
            found += part
    os.close(master)
    return found.decode().replace("\r\n", "\n")


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # how Linux says that nobody writes any more
        return b""
