"""Two plans side by side, drawn for a terminal and as JSON: what changed, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.codec import Json
from autopar.ir.comparison import Change, Comparison, FigureChange, Move, Place
from autopar.ir.explanation import TrafficChange
from autopar.ir.sharding import spec_text
from autopar.ir.text import show_bytes, show_seconds, show_type
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts
from autopar.report.table import Cell, Table, rest

_SHOWN = 8


def comparison(found: Comparison, names: tuple[str, str]) -> RenderableType:
    """The differences of two plans of these names; one line where there are none."""
    if found.is_equal:
        return Text.assemble("the same plan of ", (found.step, f"bold {ACCENT}"))
    parts: list[RenderableType] = [_head(found, names)]
    if said := (*found.asked, *found.made_with, *found.decisions):
        parts += ["", _changes("Options and decisions", "", said, names)]
    if found.moves:
        parts += ["", *_moves(found.moves)]
    if found.inner:
        parts += ["", _changes("Values within the step", "value", found.inner, names)]
        if others := found.inner_count - len(found.inner):
            parts.append(Text(f"and {others} more", style=QUIET))
    if found.traffic:
        parts += ["", _traffic(found.traffic)]
    return Group(*parts)


def _head(found: Comparison, names: tuple[str, str]) -> RenderableType:
    title = Text.assemble(
        ("diff ", QUIET), (found.step, f"bold {ACCENT}"), (": ", QUIET), " -> ".join(names)
    )
    pairs: list[tuple[str, str | Text]] = [("verdict", _verdict(found))]
    if not found.same_graph:
        pairs.append(("steps", "their operations differ: arguments are compared by path"))
    if found.renamed:
        told = ", ".join(f"{other} is {own}" for own, other in found.renamed)
        pairs.append(("axes", f"named as in the first plan: {told}"))
    pairs += [(f.name, _figure(f)) for f in found.figures]
    if found.peak_kinds:
        pairs.append(("of the peak", Text(found.peak_text, style=QUIET)))
    return Group(title, facts(pairs))


def _verdict(found: Comparison) -> Text:
    if found.decides_alike:
        return Text("the same decisions", style=f"bold {GOOD}")
    counts = (
        (len(found.decisions), "decision"),
        (sum(m.count for m in found.moves), "argument"),
        (found.inner_count, "value"),
        (len(found.traffic), "kind of collective"),
    )
    told = ", ".join(_count(n, what) for n, what in counts if n)
    return Text.assemble(("differs", f"bold {BAD}"), f": {told}")


def _count(count: int, what: str) -> str:
    head, _, rest = what.partition(" ")
    return f"{count} {head}{'s' * (count != 1)} {rest}".rstrip()


def _figure(change: FigureChange) -> Text:
    more = change.after > change.before
    return Text.assemble(
        f"{change.show(change.before)} -> ",
        (change.show(change.after), "bold"),
        (f"  {change.difference}", BAD if more else GOOD),
    )


def _changes(title: str, of: str, changes: tuple[Change, ...], names: tuple[str, str]) -> Table:
    rows = [(c.name, c.before or "-", c.after or "-") for c in changes]
    return Table(title, (f"~{of}", *names), rows)


def _moves(moves: tuple[Move, ...]) -> Iterator[RenderableType]:
    retyped = [m for m in moves if _type(m.before) != _type(m.after)]
    rows: list[tuple[Cell, ...]] = []
    for m in moves[:_SHOWN]:
        before, after = (_place(p, with_type=m in retyped) for p in (m.before, m.after))
        times = f"{m.count} x " if m.count > 1 else ""
        # Bytes of one device's piece in each plan, said once where they agree.
        held = [show_bytes(p.local_bytes) for p in (m.before, m.after) if p is not None]
        rows.append((m.path, before, after, times + " -> ".join(dict.fromkeys(held))))
    columns = ("/path", "before", "after", ">a device")
    yield Table("Arguments that are sharded differently", columns, rows)
    yield from rest(len(moves) - _SHOWN, "--json lists {}")


def _type(place: Place | None) -> str:
    return show_type(place.dtype, place.shape) if place is not None else ""


def _place(place: Place | None, *, with_type: bool) -> str:
    if place is None:
        return "-"
    kind = f"{_type(place)} " if with_type else ""
    where = ", ".join(f"mesh{s}" for s in place.submeshes) if any(place.submeshes) else ""
    return f"{kind}{spec_text(place.sharding)} {where}".rstrip()


def _traffic(changes: tuple[TrafficChange, ...]) -> Table:
    rows = [
        (
            t.kind, " + ".join(t.axes), _pair(*map(str, t.count)),
            _pair(*map(show_bytes, t.nbytes)), _pair(*map(show_seconds, t.seconds)),
        )
        for t in changes
    ]  # fmt: skip
    title = "Collectives of the busiest device in a step"
    return Table(title, ("kind", "axes", "count", "bytes", "time"), rows)


def _pair(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


# -- JSON --------------------------------------------------------------------------------------


def comparison_data(found: Comparison) -> dict[str, Json]:
    """The same as one JSON object; seconds, bytes and PartitionSpecs, pairs as [before, after]."""
    return {
        "step": found.step,
        "equal": found.is_equal,
        "same_decisions": found.decides_alike,
        "same_graph": found.same_graph,
        "renamed_axes": [list(pair) for pair in found.renamed],
        "asked": _change_rows(found.asked),
        "made_with": _change_rows(found.made_with),
        "decisions": _change_rows(found.decisions),
        "arguments": [
            {"path": m.path, "count": m.count, "role": m.role, "before": _place_data(m.before),
             "after": _place_data(m.after)}
            for m in found.moves
        ],
        "values": _change_rows(found.inner),
        "values_count": found.inner_count,
        "collectives": [
            {"kind": t.kind, "axes": list(t.axes), "count": list(t.count), "bytes": list(t.nbytes),
             "seconds": list(t.seconds)}
            for t in found.traffic
        ],
        "figures": [
            {"name": f.name, f.unit: [f.before, f.after], "share": f.share} for f in found.figures
        ],
    }  # fmt: skip


def _change_rows(changes: tuple[Change, ...]) -> list[Json]:
    return [{"name": c.name, "before": c.before, "after": c.after} for c in changes]


def _place_data(place: Place | None) -> Json:
    if place is None:
        return None
    return {
        "shape": list(place.shape),
        "dtype": place.dtype,
        "sharding": spec_text(place.sharding),
        "local_bytes": place.local_bytes,
        "submeshes": list(place.submeshes),
    }
