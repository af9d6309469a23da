"""The meaning of a plan for a terminal: its axes, what runs, what is sent and what is held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from autopar.ir.inspection import (
    AxisRole,
    AxisUse,
    CommRow,
    Inspection,
    MemoryCurve,
    MemoryLevel,
    ModuleRow,
    OpRow,
    Spot,
)
from autopar.ir.peak import HeldKind
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.ir.values import Role
from autopar.report.rows import (
    Row,
    alike_axes,
    comm_sums,
    hidden_share,
    kind_rows,
    numbers_text,
    ops_total,
)
from autopar.report.style import ACCENT, QUIET
from autopar.report.table import Cell, Table, cell_of, percent, rest
from autopar.schedule.planned import busiest_submesh

# -- mesh axes -------------------------------------------------------------------------------------

Roles = Mapping[tuple[int, str], tuple[AxisRole, ...]]

_OF_STATE = (AxisRole.FSDP, AxisRole.TENSOR, AxisRole.EXPERT)
_OF_BATCH = (AxisRole.DATA, AxisRole.SEQUENCE)


def axes(uses: Sequence[AxisUse], plan: Plan | None = None) -> Table:
    """The axes with their sizes and roles; those of several submeshes used alike are one row."""
    cut = plan is not None and len(plan.submeshes) > 1
    rows: list[tuple[Cell, ...]] = [_axis(group, cut) for group in alike_axes(uses)]
    if plan is not None and cut:
        count = len(plan.submeshes)
        note = f"{len(plan.stages)} stages run on {count} submeshes."
        row = ("stage", str(count), "stage", f"mesh0..{count - 1}", Text(note, style=QUIET))
        rows.insert(0, row)
    columns = ("axis", ">size", "roles", "mesh", "evidence")
    return Table("Mesh axes and their roles", columns, rows, lead=4)


def _axis(group: list[AxisUse], cut: bool) -> tuple[Cell, ...]:
    first = group[0]
    same = all(use.evidence == first.evidence for use in group)
    where = "" if same else f"mesh{first.submesh}: "
    evidence = Text(where + " ".join(first.evidence), style=QUIET)
    meshes = f"mesh{numbers_text([use.submesh for use in group])}" if cut else ""
    return (first.axis, str(first.size), roles_text(first.roles), meshes, evidence)


def roles_of(uses: Sequence[AxisUse]) -> Roles:
    """(submesh, axis) -> roles."""
    return {(use.submesh, use.axis): use.roles for use in uses}


def roles_text(roles: Sequence[AxisRole]) -> str:
    """Roles as words."""
    return ", ".join(role.value for role in roles)


def axis_roles(sharding: Sharding, role: str, submesh: int, roles: Roles) -> str:
    """The roles of the axes that an argument lies over: of each axis those that fit it."""
    fitting = _OF_BATCH if role == Role.BATCH.value else _OF_STATE
    found: dict[str, None] = {}
    for axis in sharding.axes():
        all_of = roles.get((submesh, axis), ())
        found.update(dict.fromkeys(r.value for r in [r for r in all_of if r in fitting] or all_of))
    return ", ".join(found)


# -- ops -------------------------------------------------------------------------------------------


def ops(rows: Sequence[OpRow], shown: int | None) -> RenderableType:
    """The ops of a step, with their shardings and what they take; all where `shown` is None."""
    note = (
        "FLOP: of all runs, on all devices · time: of all runs, on one device; 0 s where another "
        "op's kernel does the work"
    )
    ordered = sorted(rows, key=lambda r: (-r.seconds, -r.flops, r.spot.stage, r.path))
    kept = ordered[:shown]
    table = Table(
        "Ops of a step, the costliest first",
        ("/op", "line", "part", "sharding", ">runs", ">FLOP", ">time"),
        [_op(row) for row in kept],
        ("all", "", "", "", *(cell_of(key, total) for key, total in ops_total(rows).items())),
        lead=2,
    )
    return Group(table, *rest(len(ordered) - len(kept)), Text(note, style=QUIET))


def _op(row: OpRow) -> tuple[Cell, ...]:
    name = f"{row.spot.module} {row.kind}".strip()
    return (
        name, Text(row.spot.line, style=QUIET), where(row.spot), show_sharding(row.sharding),
        str(row.runs), show_count(row.flops, "FLOP"), show_seconds(row.seconds),
    )  # fmt: skip


def where(spot: Spot) -> str:
    """The region of the step, with the part of the stage where there is one: F1 forward."""
    return f"{spot.part} {spot.region}".strip()


def show_sharding(sharding: Sharding) -> Text:
    """A sharding as its user writes it, and the axes over which it is still a partial sum."""
    text = Text(spec_text(sharding), style=QUIET if sharding.is_replicated else "")
    return text.append(f" partial {'+'.join(sharding.partial)}" if sharding.partial else "")


# -- modules ---------------------------------------------------------------------------------------


def modules(rows: Sequence[ModuleRow], shown: int | None) -> RenderableType:
    """The tree of modules; past `shown` rows the deepest and least are left out."""
    whole = max((r.seconds for r in rows), default=0.0)
    by_size = sorted(rows, key=lambda r: (r.depth, -r.seconds, -r.parameter_bytes, r.path))
    kept = frozenset(by_size[:shown])
    table = Table(
        "Modules",
        ("module", "stages", ">parameters", ">FLOP", ">time", ">share"),
        [_cells(name, r, whole) for name, r in _name_rows([r for r in as_tree(rows) if r in kept])],
    )
    added = ", those of several stages added up" if any(len(r.stages) > 1 for r in rows) else ""
    note = f"FLOP: of a step, on all devices · time: of a step, on one device{added}"
    return Group(table, *rest(len(rows) - len(kept)), Text(note, style=QUIET))


def as_tree(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Order modules so that each stands right before those in it, siblings as they come."""
    first: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for i, row in enumerate(rows):
        first.setdefault((row.path, None), i)
        first.setdefault((row.path, row.stages), i)

    def places(i: int) -> tuple[int, ...]:
        """The places of the rows around row i, of several of one path that of the same stages."""
        path, stages = rows[i].path, rows[i].stages
        above = ["", *(path[:end] for end, letter in enumerate(path) if letter == "/")]
        found = (first.get((p, stages), first.get((p, None))) for p in above)
        return (*(place for place in found if place is not None), i)

    return [rows[i] for i in sorted(range(len(rows)), key=places)]


def places_around(tree: Sequence[ModuleRow]) -> Iterator[tuple[int, ...]]:
    """The places of the modules that each row of a tree is in, the innermost last.

    Modules of several stages may have one name, so names alone do not tell what is in which: each
    is in the last ones before it that its path begins with. The whole step, "", is around none.
    """
    around: list[int] = []
    for place, row in enumerate(tree):
        while around and not row.path.startswith(f"{tree[around[-1]].path}/"):
            around.pop()
        yield tuple(around)
        if row.path:
            around.append(place)


def _name_rows(rows: Sequence[ModuleRow]) -> Iterator[tuple[str, ModuleRow]]:
    """Rows with their names, each set in under the row that it is in."""
    for row, around in zip(rows, places_around(rows), strict=True):
        name = row.path.removeprefix(f"{rows[around[-1]].path}/") if around else row.path
        times = f"{row.count} x " if row.count > 1 else ""
        yield "  " * len(around) + times + (name or "the whole step"), row


def _cells(name: str, row: ModuleRow, whole: float) -> tuple[Cell, ...]:
    stages = f"S{numbers_text(row.stages)}" if row.stages else ""
    return (
        name, stages, show_bytes(row.parameter_bytes),
        show_count(row.flops, "FLOP"), show_seconds(row.seconds),
        percent(row.seconds / whole if whole > 0 else 0.0),
    )  # fmt: skip


# -- collectives -----------------------------------------------------------------------------------


def communication(found: Inspection, plan: Plan, shown: int | None) -> RenderableType:
    """The collectives of a step, the costliest first; all of them where `shown` is None."""
    rows = found.collectives
    if not rows:
        return no_collectives(plan)
    note = (
        "bytes: one device's buffer in one run · time: of all runs in a step · hidden: the "
        "share of it that overlaps with compute"
    )
    kept = rows[:shown]
    table = Table(
        "Each collective, the costliest first",
        ("/moves", "line", "part", "kind", "axes", ">runs x bytes", ">time", ">hidden"),
        [_collective(row) for row in kept],
        lead=2,
    )
    left_out = rest(len(rows) - len(kept))
    parts = [collectives_by_kind(found, plan), *_elsewhere(found), "", table, *left_out]
    return Group(*parts, Text(note, style=QUIET))


def no_collectives(plan: Plan) -> Text:
    """A line in place of a table of nothing."""
    where = "" if plan.is_one_program else " within a stage"
    return Text(f"No collectives{where}: devices do not communicate.", style=QUIET)


def collectives_title(plan: Plan) -> str:
    """Whose collectives a table adds up: those of one device, of the busiest where they differ."""
    count = len(plan.submeshes)
    where = f" of mesh{busiest_submesh(plan)}, the busiest of {count}," if count > 1 else ""
    times = f", all {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    return f"Collectives of a device{where} in a step{times}"


def collectives_by_kind(found: Inspection, plan: Plan) -> RenderableType:
    """The collectives of a device of the busiest submesh in a few rows."""
    rows = found.device_collectives
    if not rows:
        return no_collectives(plan)
    columns = {
        "kind": "kind", "axes": "axes", ">runs": "runs", ">bytes": "bytes", ">time": "seconds",
        ">hidden": "hidden_share",
    }  # fmt: skip
    total: Row = {"kind": "all", **comm_sums(rows)}
    return Table.of(collectives_title(plan), columns, kind_rows(rows), total)


def _elsewhere(found: Inspection) -> Iterator[Text]:
    """The collectives of a device of each of the other submeshes, in a line where they agree."""
    alike: dict[tuple[str, str], list[int]] = {}
    for k in sorted({row.submesh for row in found.collectives} - {found.busiest}):
        rows = [row for row in found.collectives if row.submesh == k]
        sent = show_bytes(sum(r.total_bytes for r in rows))
        alike.setdefault((sent, show_seconds(sum(r.seconds for r in rows))), []).append(k)
    for (sent, seconds), meshes in alike.items():
        yield Text(f"a device of mesh{numbers_text(meshes)}: {sent}, {seconds}", style=QUIET)


def _collective(row: CommRow) -> tuple[Cell, ...]:
    moves = f"{row.value} for {row.reader}" if row.reader else row.value
    roles = f" ({roles_text(row.roles)})" if row.roles else ""
    return (
        moves, Text(row.spot.line, style=QUIET), where(row.spot), row.kind,
        " + ".join(row.axes) + roles, f"{row.runs} x {show_bytes(row.nbytes)}",
        show_seconds(row.seconds), percent(hidden_share([row])),
    )  # fmt: skip


# -- memory over time ------------------------------------------------------------------------------

_ROWS, _MOST_COLUMNS = 6, 100
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GIVEN = (HeldKind.PARAMETER, HeldKind.OPTIMIZER, HeldKind.BATCH, HeldKind.CONSTANT)


@dataclass(frozen=True)
class _Curve:
    """A curve as wide as the terminal: bytes upwards from nothing, seconds to the right."""

    curve: MemoryCurve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Six rows of blocks, their scales, and under them the peak."""
        del console
        levels, top = self.curve.levels, self.curve.levels[self.curve.peak]
        scale = max(len(show_bytes(top.nbytes)), len("0 B"))
        width = min(options.max_width - scale - 2, _MOST_COLUMNS)
        end = levels[-1].seconds
        heights = _columns(levels, width)
        # Arguments are there throughout the step: the part below them is drawn quietly.
        given = sum(n for kind, n in top.by_kind if kind in _GIVEN)
        base = given * _ROWS / (top.nbytes or 1)
        for row in reversed(range(_ROWS)):
            mark = show_bytes(top.nbytes) if row == _ROWS - 1 else "0 B" if row == 0 else ""
            blocks = "".join(_block(h / (top.nbytes or 1) * _ROWS - row) for h in heights)
            paint = QUIET if row + 0.5 < base else ACCENT
            yield Text.assemble((f"{mark:>{scale}} ┤", QUIET), (blocks.rstrip(), paint))
        yield Text(" " * (scale + 2) + self._ruler(width, end), style=QUIET)

    def _ruler(self, width: int, end: float) -> str:
        """The step from its start to its end, the peak marked where there is room for it."""
        peak = self.curve.levels[self.curve.peak].seconds
        at, last = min(int(peak / (end or 1.0) * width), width - 1), show_seconds(end)
        line = f"{'0 s':<{width - len(last)}}{last}"
        return f"{line[:at]}▲{line[at + 1 :]}" if line[at] == " " else line


def memory_over_time(curves: Sequence[MemoryCurve]) -> RenderableType:
    """The fullest submesh's curve and its peak, and the peaks of the others."""
    filled = [c for c in curves if c.levels]
    if not filled:
        return Text("The plan has no step in it: memory over time is not known.", style=QUIET)
    fullest = max(filled, key=lambda c: c.levels[c.peak].nbytes)
    where = f", mesh{fullest.submesh}" if len(filled) > 1 else ""
    title = Text(f"Memory over a step{where}", style=f"bold {ACCENT}")
    others = [_peak(c, f"mesh{c.submesh} ") for c in filled if c is not fullest]
    return Group(title, _Curve(fullest), _peak(fullest, "▲ "), *others)


def _peak(curve: MemoryCurve, name: str) -> Text:
    top = curve.levels[curve.peak]
    when = f" at {show_seconds(top.seconds)}"
    return Text.assemble((name, QUIET), show_bytes(top.nbytes), (f"{when}: {top.label}", QUIET))


def _columns(levels: Sequence[MemoryLevel], width: int) -> list[int]:
    """The most that is held in each of so many equal parts of the step."""
    end = levels[-1].seconds or 1.0
    found = [0] * width
    for i, level in enumerate(levels):
        until = levels[i + 1].seconds if i + 1 < len(levels) else end
        first = min(int(level.seconds / end * width), width - 1)
        last = max(first + 1, min(math.ceil(until / end * width), width))
        for column in range(first, last):
            found[column] = max(found[column], level.nbytes)
    return found


def _block(height: float) -> str:
    return _EIGHTHS[round(max(0.0, min(1.0, height)) * (len(_EIGHTHS) - 1))]
