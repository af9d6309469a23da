"""How every table and headline of the terminal looks."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from autopar.report.listing import Listing
from autopar.report.listing import SlashedPath as SlashedPath
from autopar.report.palette import ACCENT as ACCENT
from autopar.report.palette import BAD as BAD
from autopar.report.palette import GOOD as GOOD
from autopar.report.palette import QUIET as QUIET

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_LEAST_FOLD = 12  # columns below which a cell that folds is no longer read with ease


class PlainTable(Table):
    """A table that becomes a listing where the terminal is too narrow for its figures."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or the same rows on several lines each."""
        if _least_width(self.columns) <= options.max_width:
            yield from Table.__rich_console__(self, console, options)
            return
        cells = zip(*(map(_text, column.cells) for column in self.columns), strict=True)
        title = self.title if isinstance(self.title, str) else ""
        yield Listing(title, tuple(map(_name, self.columns)), list(cells))


def _least_width(columns: Sequence[Column]) -> int:
    """The fewest columns of the terminal in which a table can still be read."""
    found = 3 * (len(columns) - 1)
    for column in columns:
        lines = (line for cell in (column.header, *column.cells) for line in _text(cell).split())
        whole = max((line.cell_len for line in lines), default=0)
        found += whole if column.no_wrap else min(whole, _LEAST_FOLD)
    return found


def _name(column: Column) -> str:
    """A column's name as a listing has it."""
    broken = any(isinstance(cell, SlashedPath) for cell in column.cells)
    mark = ">" if column.justify == "right" else "/" if broken else ""
    return mark + _text(column.header).plain.replace("\n", " ")


def _text(cell: RenderableType) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(cell.path if isinstance(cell, SlashedPath) else str(cell))


def plain_table(title: str, *columns: str) -> PlainTable:
    """A table with a rule under its head; a column whose name starts with > is set right.

    A leading ~ marks the column that folds where the terminal is narrow.
    """
    table = PlainTable(
        title=title or None,
        title_justify="left",
        title_style=f"bold {ACCENT}",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
    )
    for name in columns:
        fold, right = name.startswith("~"), name.startswith(">")
        table.add_column(
            name.lstrip(">~"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=not fold,
        )
    return table


def facts(pairs: list[tuple[str, str | Text]]) -> Table:
    """Names on the left, what there is to say of them on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


def percent(share: float) -> str:
    """A share in per cent: what is there but rounds to nothing says so."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def bar(share: float, width: int = 20) -> Text:
    """A share of one as a bar of eighths; full and red from one on."""
    whole = max(0.0, min(1.0, share)) * width
    full, rest = int(whole), int((whole - int(whole)) * 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    color = BAD if share >= 1 else "yellow" if share > 0.9 else GOOD
    return Text.assemble((filled, color), ("·" * (width - len(filled)), QUIET))


def sparkline(numbers: list[float], width: int = 40) -> str:
    """Numbers as a line of blocks, from the least to the greatest."""
    if not numbers:
        return ""
    picked = [numbers[i * len(numbers) // width] for i in range(width)]
    picked = picked if len(numbers) > width else numbers
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(_LEVELS[round((n - low) / span * (len(_LEVELS) - 1))] for n in picked)
