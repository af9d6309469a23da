"""Every collective for a terminal: what it moves, for which op and line, how long, how hidden."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.inspection import CommRow
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.axes import roles_text
from autopar.report.listing import Cell, Listing
from autopar.report.ops import rest, where
from autopar.report.style import QUIET, percent

_NOTE = (
    "bytes: one device's buffer in one run · time: of all runs in a step · hidden: what of it "
    "passes beside work"
)


def communication(rows: Sequence[CommRow], shown: int | None) -> RenderableType:
    """The collectives of a step, the costliest first; all of them where `shown` is None."""
    if not rows:
        return Text("No collectives: no device waits for another.", style=QUIET)
    ordered = sorted(rows, key=lambda r: (-r.seconds, -r.total_bytes))
    kept = ordered[:shown]
    table = Listing(
        "Each collective, the costliest first",
        ("/moves", "line", "runs in", "kind", "axes", ">runs x bytes", ">time", ">hidden"),
        [_row(row) for row in kept],
        lead=2,
    )
    left_out = rest(len(ordered) - len(kept))
    return Group(collectives_by_kind(ordered), "", table, *left_out, Text(_NOTE, style=QUIET))


def by_kind(rows: Sequence[CommRow]) -> dict[tuple[str, tuple[str, ...]], list[CommRow]]:
    """Collectives of one kind over the same axes together, the costliest first."""
    groups: dict[tuple[str, tuple[str, ...]], list[CommRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.axes), []).append(row)
    return dict(sorted(groups.items(), key=lambda g: (-sum(r.seconds for r in g[1]), g[0])))


def hidden_share(rows: Sequence[CommRow]) -> float:
    """What of the time of some collectives passes beside work."""
    seconds = sum(r.seconds for r in rows)
    return sum(r.hidden_seconds for r in rows) / seconds if seconds > 0 else 0.0


def collectives_by_kind(rows: Sequence[CommRow]) -> Listing:
    """The collectives of a step in a few rows."""
    found = [
        (kind, " + ".join(axes), *_sums(group)) for (kind, axes), group in by_kind(rows).items()
    ]
    columns = ("kind", "axes", ">runs", ">bytes", ">time", ">hidden")
    return Listing("Collectives in a step", columns, found, ("all", "", *_sums(rows)))


def _sums(rows: Sequence[CommRow]) -> tuple[str, ...]:
    runs, nbytes = sum(r.runs for r in rows), sum(r.total_bytes for r in rows)
    seconds = show_seconds(sum(r.seconds for r in rows))
    return str(runs), show_bytes(nbytes), seconds, percent(hidden_share(rows))


def _row(row: CommRow) -> tuple[Cell, ...]:
    moves = f"{row.value} for {row.reader}" if row.reader else row.value
    roles = f" ({roles_text(row.roles)})" if row.roles else ""
    return (
        moves, Text(row.spot.line, style=QUIET), where(row.spot), row.kind,
        " + ".join(row.axes) + roles, f"{row.runs} x {show_bytes(row.nbytes)}",
        show_seconds(row.seconds), percent(hidden_share([row])),
    )  # fmt: skip
