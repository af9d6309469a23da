"""Rows under columns for a terminal of any width: where it is narrow, a row takes several lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

from autopar.ir.codec import Json
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.report.style import ACCENT, QUIET

Cell = str | Text
Lines = tuple[tuple[int, ...], ...]
_MARKS = ">/~"  # what a column is like
_LEAST_FOLD = 12  # columns below which a cell that folds is no longer read with ease
_WIDE, _CLOSE, _INDENT = 3, 2, 2  # blanks between cells, and before later lines


@dataclass(frozen=True)
class SlashedPath:
    """A path that a narrow column breaks after its slashes, later lines set in."""

    path: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The path on as many lines as the width asks for."""
        del console
        yield Text("\n".join(self.lines(options.max_width)), overflow="fold")

    def lines(self, width: int) -> list[str]:
        """The path on lines of a width."""
        lines = [""]
        for part in self._parts():
            if lines[-1].strip() and len(lines[-1]) + len(part) > width:
                lines.append("  ")
            lines[-1] += part
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the longest part to the whole path."""
        del console
        longest = max(len(part) for part in self._parts()) + 2
        return Measurement(min(longest, len(self.path)), len(self.path)).with_maximum(
            options.max_width
        )

    def _parts(self) -> list[str]:
        *parents, last = self.path.split("/")
        return [*(f"{parent}/" for parent in parents), last]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title and the names of their columns, with nothing ever cut off.

    A name that starts with > is set right; cells of one that starts with / are broken at slashes; a
    name may have several lines. Where rows are wider than the terminal, a column whose name starts
    with ~ is folded if that is enough. Else a row begins with its first `lead` cells alone, unless
    that takes more lines, and what follows is set in. A column with nothing in its rows is left
    out. A row without cells is a blank line. `total` stands below the rows.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    total: tuple[Cell, ...] = ()
    lead: int = 1

    @classmethod
    def of(
        cls,
        title: str,
        columns: Mapping[str, str],
        rows: Sequence[Mapping[str, Json]],
        total: Mapping[str, Json] | None = None,
        lead: int = 1,
    ) -> Table:
        """Rows of data; `columns` are the keys by their names, and a key tells its cells' unit."""

        def cells(row: Mapping[str, Json]) -> tuple[str, ...]:
            return tuple(cell_of(key, row.get(key)) for key in columns.values())

        last = cells(total) if total is not None else ()
        return cls(title, tuple(columns), [cells(row) for row in rows], last, lead)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The rows on as few lines as the width asks for."""
        layout, heads = self._layout(self._heads(), console, options.max_width)
        if len(layout.lines) > 1 and len(heads) > 1:  # names of several lines would come apart
            joined = [tuple(name.lstrip(_MARKS).replace("\n", " ") for name in self.columns)]
            layout, heads = self._layout(joined, console, options.max_width)
        if self.title:
            yield Text(self.title, style=f"bold {ACCENT}")
        for head in heads:
            yield from layout.draw(head, "bold")
        yield Text("─" * layout.width)
        for row in self.rows:
            yield from layout.draw(row, "") if row else (Text(),)
        if self.total:
            yield Text()
            yield from layout.draw(self.total, "bold")

    def _heads(self) -> list[tuple[str, ...]]:
        """The names of the columns, line by line; the last lines stand together."""
        names = [name.lstrip(_MARKS).split("\n") for name in self.columns]
        depth = max(map(len, names))
        return [
            tuple(lines[k - depth] if k - depth >= -len(lines) else "" for lines in names)
            for k in range(depth)
        ]

    def _layout(
        self, heads: list[tuple[str, ...]], console: Console, room: int
    ) -> tuple[_Layout, list[tuple[str, ...]]]:
        rows = [row for row in self.rows if row]
        table = (*heads, *rows, *((self.total,) if self.total else ()))
        every = tuple(range(len(self.columns)))
        widths = tuple(max(_text(row[i]).cell_len for row in table) for i in every)
        filled = tuple(i for i in every if any(_text(row[i]) for row in rows)) or every
        columns = _Columns(self.columns, widths, room, console)
        return columns.folded(table, filled) or _fit(columns, filled, self.lead), heads


def cell_of(key: str, value: Json) -> str:
    """A value of data as text: its unit is told by the end of its key, as "bytes" and "seconds"."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " + ".join(map(str, value))
    if not isinstance(value, int | float):
        return str(value)
    return next((show(value) for end, show in _UNITS.items() if key.endswith(end)), str(value))


def percent(share: float) -> str:
    """A share in per cent: what is there but rounds to nothing says so."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": show_seconds,
    "bytes": show_bytes,
    "flops": partial(show_count, unit="FLOP"),
    "more_share": "{:+.0%}".format,
    "share": percent,
}


def rest(count: int, how: str = "--all shows {}") -> tuple[Text, ...]:
    """A line that tells how many rows are left out, and how to have them; none for 0."""
    rows, them = ("row", "it") if count == 1 else ("rows", "them")
    return (Text(f"and {count} more {rows}: {how.format(them)}", style=QUIET),) if count > 0 else ()


@dataclass(frozen=True)
class _Columns:
    """Columns by name and width, how far apart they stand, and the room that there is for them."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    room: int
    console: Console
    gap: int = _WIDE

    def folded(self, table: Sequence[tuple[Cell, ...]], shown: Sequence[int]) -> _Layout | None:
        """A layout of a line a row, if a column folds and can be read in the room left."""
        over = self.takes(shown, set_in=False) - self.room
        for i in shown:
            words = (w for row in table for w in _text(row[i]).plain.replace("/", "/ ").split())
            least = max(_LEAST_FOLD, *map(len, words))
            if over > 0 and self.names[i].startswith("~") and self.widths[i] - over >= least:
                widths = (*self.widths[:i], self.widths[i] - over, *self.widths[i + 1 :])
                return _Layout(replace(self, widths=widths), (tuple(shown),))
        return None

    def takes(self, line: Sequence[int], set_in: bool) -> int:
        """The width of a line of some columns."""
        gaps = self.gap * (len(line) - 1) + (_INDENT if set_in else 0)
        return sum(self.widths[i] for i in line) + gaps

    def breaks(self, column: int) -> bool:
        """True if the cells of a column are paths, which break after slashes."""
        return self.names[column].lstrip("~").startswith("/")

    def pack(self, columns: Sequence[int], set_in: bool = True) -> Lines:
        """Columns on as few lines as they fit on, in their order."""
        lines: list[tuple[int, ...]] = []
        for i in columns:
            if lines and self.takes((*lines[-1], i), set_in or len(lines) > 1) <= self.room:
                lines[-1] = (*lines[-1], i)
            else:
                lines.append((i,))
        return tuple(lines)

    def apart(self, columns: Sequence[int], lead: int) -> Lines:
        """The first columns, then the others: words before figures where not all fit on a line."""
        others = [i for i in columns if i >= lead]
        words = [i for i in others if not self.names[i].startswith(">")]
        figures = [i for i in others if self.names[i].startswith(">")]
        together = self.pack(others)
        split = self.pack(words) + self.pack(figures)
        rest = together if len(together) == 1 else min(split, together, key=len)
        return self.pack([i for i in columns if i < lead], set_in=False) + rest


@dataclass(frozen=True)
class _Layout:
    """The columns on each line of a row."""

    columns: _Columns
    lines: Lines

    @property
    def width(self) -> int:
        """The width of the widest line."""
        widest = max(self.columns.takes(line, i > 0) for i, line in enumerate(self.lines))
        return min(widest, self.columns.room)

    def draw(self, row: tuple[Cell, ...], style: str) -> Iterator[RenderableType]:
        """A row's lines; one that is empty is left out, a cell that is too wide is broken."""
        cells = tuple(map(_text, row))
        for number, line in enumerate(self.lines):
            indent = _INDENT if number else 0
            if len(line) == 1 and cells[line[0]].cell_len > self.columns.room - indent:
                cell = cells[line[0]]
                shown = SlashedPath(cell.plain) if self.columns.breaks(line[0]) else cell
                yield Padding(shown, (0, 0, 0, indent), style=style, expand=False)
            elif any(cells[i] for i in line):
                for part in self._folded(cells, line):
                    yield self._line(part, line, style, indent)

    def _folded(self, cells: tuple[Text, ...], line: Sequence[int]) -> Iterator[tuple[Text, ...]]:
        """The cells line by line, where one is wider than its column."""
        widths, console = self.columns.widths, self.columns.console
        wide = next((i for i in line if cells[i].cell_len > widths[i]), None)
        if wide is None:
            yield cells
            return
        cell = cells[wide]
        if self.columns.breaks(wide):
            cell = Text("\n".join(SlashedPath(cell.plain).lines(widths[wide])), style=cell.style)
        for k, part in enumerate(cell.wrap(console, widths[wide], overflow="fold")):
            part.rstrip()
            others = cells if k == 0 else (Text(),) * len(cells)
            yield (*others[:wide], part, *others[wide + 1 :])

    def _line(self, cells: tuple[Text, ...], line: Sequence[int], style: str, indent: int) -> Text:
        text = Text(" " * indent, style=style)
        for i in line:
            blank = " " * (self.columns.widths[i] - cells[i].cell_len)
            right = self.columns.names[i].startswith(">")
            gap = " " * self.columns.gap if i != line[0] else ""
            text.append(gap + (blank if right else "")).append_text(cells[i])
            text.append("" if right else blank)
        text.rstrip()
        return text


def _fit(columns: _Columns, shown: tuple[int, ...], lead: int) -> _Layout:
    """As few lines a row as do, the cells closer together if that saves one."""
    layouts = [
        _Layout(spaced, lines)
        for spaced in (columns, replace(columns, gap=_CLOSE))
        for lines in (spaced.apart(shown, lead), spaced.pack(shown, set_in=False))
    ]
    return min(layouts, key=lambda layout: len(layout.lines))


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
