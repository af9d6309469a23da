"""The parts of a model for a terminal: a tree of modules with their parameters, work and stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.inspection import ModuleRow
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.report.listing import Cell, Listing
from autopar.report.ops import rest
from autopar.report.style import QUIET, percent
from autopar.report.view import numbers_text


def modules(rows: Sequence[ModuleRow], shown: int | None) -> RenderableType:
    """Every module under the one it is of; past `shown` rows the deepest and least are left out."""
    whole = max((r.seconds for r in rows), default=0.0)
    by_size = sorted(rows, key=lambda r: (r.depth, -r.seconds, -r.parameter_bytes, r.path))
    kept = frozenset(by_size[:shown])
    table = Listing(
        "Modules",
        ("module", "stages", ">parameters", ">FLOP", ">time", ">share"),
        [_cells(name, r, whole) for name, r in _named([r for r in as_tree(rows) if r in kept])],
    )
    added = ", those of several stages added up" if any(len(r.stages) > 1 for r in rows) else ""
    note = f"FLOP: of a step, on all devices · time: of a step, on one device{added}"
    return Group(table, *rest(len(rows) - len(kept)), Text(note, style=QUIET))


def as_tree(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Every module right before those in it, siblings in the order in which they come."""
    first: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for i, row in enumerate(rows):
        first.setdefault((row.path, None), i)
        first.setdefault((row.path, row.stages), i)

    def places(i: int) -> tuple[int, ...]:
        """Where the rows around row i are, of several of one path that of the same stages."""
        path, stages = rows[i].path, rows[i].stages
        above = ["", *(path[:end] for end, letter in enumerate(path) if letter == "/")]
        found = (first.get((p, stages), first.get((p, None))) for p in above)
        return (*(place for place in found if place is not None), i)

    return [rows[i] for i in sorted(range(len(rows)), key=places)]


def _named(rows: Sequence[ModuleRow]) -> Iterator[tuple[str, ModuleRow]]:
    """Rows with their names, each set in under the row that it is in."""
    around: list[str] = []
    for row in rows:
        while around and not row.path.startswith(f"{around[-1]}/"):
            around.pop()
        name = row.path.removeprefix(f"{around[-1]}/") if around else row.path
        times = f"{row.count} x " if row.count > 1 else ""
        yield "  " * len(around) + times + (name or "the whole step"), row
        if row.path:
            around.append(row.path)


def _cells(name: str, row: ModuleRow, whole: float) -> tuple[Cell, ...]:
    stages = f"S{numbers_text(row.stages)}" if row.stages else ""
    return (
        name, stages, show_bytes(row.parameter_bytes),
        show_count(row.flops, "FLOP"), show_seconds(row.seconds),
        percent(row.seconds / whole if whole > 0 else 0.0),
    )  # fmt: skip
