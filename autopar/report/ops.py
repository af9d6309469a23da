"""What runs where, for a terminal: ops by module path and the user's line, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.inspection import OpRow, Spot
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.text import show_count, show_seconds
from autopar.report.listing import Cell, Listing
from autopar.report.style import QUIET

_NOTE = (
    "FLOP: of all runs, on all devices · time: of all runs, on one device; 0 s where another op's "
    "kernel does the work"
)


def ops(rows: Sequence[OpRow], shown: int | None) -> RenderableType:
    """The ops of a step, with their shardings and what they take; all where `shown` is None."""
    ordered = sorted(rows, key=lambda r: (-r.seconds, -r.flops, r.spot.stage, r.path))
    kept = ordered[:shown]
    table = Listing(
        "Ops of a step, the costliest first",
        ("/op", "line", "runs in", "sharding", ">runs", ">FLOP", ">time"),
        [_op(row) for row in kept],
        _all_ops(ordered),
        lead=2,
    )
    return Group(table, *rest(len(ordered) - len(kept)), Text(_NOTE, style=QUIET))


def _op(row: OpRow) -> tuple[Cell, ...]:
    name = f"{row.spot.module} {row.kind}".strip()
    return (
        name, Text(row.spot.line, style=QUIET), where(row.spot), placed(row.sharding),
        str(row.runs), show_count(row.flops, "FLOP"), show_seconds(row.seconds),
    )  # fmt: skip


def _all_ops(rows: Sequence[OpRow]) -> tuple[Cell, ...]:
    runs, flops = sum(r.runs for r in rows), sum(r.flops for r in rows)
    seconds = sum(r.seconds for r in rows)
    return "all", "", "", "", str(runs), show_count(flops, "FLOP"), show_seconds(seconds)


def rest(count: int) -> tuple[Text, ...]:
    """How many rows are left out of a table, and how to have them; none where nothing is."""
    rows, them = ("row", "it") if count == 1 else ("rows", "them")
    return (Text(f"and {count} more {rows}: --all shows {them}", style=QUIET),) if count else ()


def where(spot: Spot) -> str:
    """The region of the step, with the part of the stage where there is one: F1 forward."""
    return f"{spot.part} {spot.region}".strip()


def placed(sharding: Sharding) -> Text:
    """A sharding as its user writes it, and the axes over which it is still a partial sum."""
    text = Text(spec_text(sharding), style=QUIET if sharding.is_replicated else "")
    return text.append(f" partial {'+'.join(sharding.partial)}" if sharding.partial else "")
