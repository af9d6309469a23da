"""Rows under columns: nothing is cut off, whatever the width."""

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autopar.report.table import Table

FOUND = Table(
    "Found",
    ("/path", "kind", ">bytes"),
    [("params/block/mlp/kernel", "weights", "16 B"), ("batch", "rows", "1024 B")],
    ("all", "", "1040 B"),
)
WORDS = st.text("abc/ ", min_size=1, max_size=30).map(str.strip)


def drawn(listing: Table, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(listing)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_rows_that_fit_take_a_line() -> None:
    assert drawn(FOUND, 60) == [
        "Found",
        "path                      kind       bytes",
        "──────────────────────────────────────────",
        "params/block/mlp/kernel   weights     16 B",
        "batch                     rows      1024 B",
        "",
        "all                                 1040 B",
    ]


def test_rows_that_do_not_fit_take_two_with_figures_under_each_other() -> None:
    assert drawn(FOUND, 30) == [
        "Found",
        "path",
        "  kind       bytes",
        "───────────────────────",
        "params/block/mlp/kernel",
        "  weights     16 B",
        "batch",
        "  rows      1024 B",
        "",
        "all",
        "            1040 B",
    ]


def test_what_is_wider_than_the_terminal_is_broken_at_its_slashes() -> None:
    assert drawn(FOUND, 20)[4:6] == ["params/block/mlp/", "  kernel"]


@given(
    st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=4),
    st.integers(1, 3),
    st.integers(min_value=12, max_value=100),
)
def test_every_letter_is_there_at_every_width(
    rows: list[tuple[str, str, str]], lead: int, width: int
) -> None:
    lines = drawn(Table("", ("/first", "second", ">third"), rows, lead=lead), width)
    assert all(len(line) <= width for line in lines)
    body = lines[next(i for i, line in enumerate(lines) if "─" in line) + 1 :]
    assert _letters(body) == _letters([cell for row in rows for cell in row])


def _letters(texts: list[str]) -> list[str]:
    return sorted("".join(texts).replace(" ", ""))
