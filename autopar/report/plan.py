"""A plan for a terminal: its headline, stages, collectives, parameters and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cluster.planned import planned_cluster
from autopar.ir.compiler_options import options_text
from autopar.ir.inspection import IN_STEP, AxisUse, MemoryCurve
from autopar.ir.peak import Peak
from autopar.ir.plan import Plan
from autopar.ir.sharding import spec_text
from autopar.ir.sharding_plan import Status
from autopar.ir.stages import Remat
from autopar.ir.text import show_bytes, show_seconds, show_type
from autopar.ir.values import Role
from autopar.report.inspection import (
    axis_roles,
    collectives_title,
    memory_over_time,
    no_collectives,
    roles_of,
    roles_text,
)
from autopar.report.rows import (
    SPMD_TICKS,
    Row,
    costliest,
    exposed_share,
    holdings_of,
    meshes_of,
    numbers_text,
    price_per_gib,
    recipe_rows,
    rows_of,
    traffic_row,
)
from autopar.report.schedule import Drawing, in_clock, legend
from autopar.report.style import ACCENT, GOOD, QUIET, bar, facts
from autopar.report.table import Cell, Table, cell_of, percent, rest
from autopar.schedule.simulate import Simulation

_SHOWN = 6
_PLANNED = "found"  # the note of a recipe of which there is nothing to tell

_LOW = "low"  # the confidence of figures that nobody measured
_ROUGH = (
    "these times and rates are of a guess and may be several times off; `autopar calibrate -o "
    "ours.toml` measures your devices"
)
_ALL_ALIKE = "nothing is sharded: all {} devices do the same work; `autopar lint` may say why"


def headline(plan: Plan, uses: Sequence[AxisUse] = ()) -> RenderableType:
    """The plan's purpose, how sure the answer is, and what the step should take.

    With `uses`, the roles of the axes too: an axis is named by its place and not by its role.
    """
    o, p, outcome = plan.origin, plan.prediction, plan.outcome
    mesh = Text(" + ".join(meshes_of(plan))) + Text(f"  ({plan.device_count} devices)", style=QUIET)
    proven = outcome.status is not Status.FEASIBLE
    bound = show_seconds(outcome.bound_seconds)
    cost = show_seconds(outcome.seconds)
    lower = "" if outcome.status is Status.OPTIMAL else f"lower bound {bound}, "
    within = f"cost {cost}, {lower}gap {outcome.gap:.2%}. "
    if outcome.bound_seconds <= 0:
        within = f"cost {cost}, no lower bound. "
    if not plan.is_one_program:  # a bound for these stages, not for all that there might be
        within = f"{outcome.gap:.2%} above {bound}, the work of its busiest device. "
    solved = Text.assemble(
        (outcome.status.value, f"bold {GOOD if proven else 'yellow'}"),
        " under the cost model: " if outcome.status is Status.OPTIMAL else ": ",
        within,
        (outcome.sentence, QUIET),
    )
    predicted = Text.assemble(
        (show_seconds(p.seconds), "bold"),
        f" a step, {percent(exposed_share(plan))} of it exposed communication ",
        (f"({show_seconds(p.exposed_seconds)} of {show_seconds(p.communication_seconds)})", QUIET),
    )
    share = p.peak_bytes / o.memory_bytes
    memory = Text.assemble(
        (show_bytes(p.peak_bytes), "bold"), f" a device of {show_bytes(o.memory_bytes)}  "
    )
    pairs: list[tuple[str, str | Text]] = [
        ("mesh", mesh),
        ("method", o.method),
        ("outcome", solved),
        ("predicted", predicted),
        ("rate", _rate_text(plan)),
        ("memory", memory + bar(share) + Text(f" {percent(share)}", style=QUIET)),
    ]
    if uses and plan.is_one_program:
        roles = " · ".join(f"{use.axis}: {roles_text(use.roles)}" for use in uses)
        pairs.insert(1, ("axes", roles))
    if p.peak is not None:
        pairs.append(("peak", Text(str(p.peak))))
    if plan.compiler_options:
        pairs.append(("compiler", options_text(plan.compiler_options)))
    if (uneven := _uneven_rows(plan)) is not None:
        pairs.append(("note", Text(uneven, style="yellow")))
    if _is_whole(plan):
        pairs.append(("note", Text(_ALL_ALIKE.format(plan.device_count), style="yellow")))
    if not plan.is_one_program:
        pairs.insert(2, ("stages", _stages_text(plan)))
    source = planned_cluster(plan).chip.source
    figures = f"{source.what} ({source.date}, confidence {source.confidence})"
    pairs.append(("figures", figures))
    if source.confidence == _LOW:
        pairs.append(("rough", Text(_ROUGH, style="yellow")))
    title = Text.assemble(
        ("plan ", QUIET),
        (o.step, f"bold {ACCENT}"),
        (" on ", QUIET),
        (o.cluster_name, f"bold {ACCENT}"),
    )
    return Group(title, facts(pairs))


def _rate_text(plan: Plan) -> Text:
    """MFU, tokens or samples a second, and the resource that binds the step most."""
    spent = plan.prediction.roofline
    whole = plan.prediction.seconds or 1.0
    most = max(spent, key=lambda pair: pair[1])[0]
    shares = ", ".join(f"{name} {percent(seconds / whole)}" for name, seconds in spent)
    return Text.assemble((str(plan.rate()), "bold"), f"; bound by {most} ", (f"({shares})", QUIET))


def _uneven_rows(plan: Plan) -> str | None:
    """A note of a batch whose rows no axis of the mesh divides; None for any other."""
    batch = [a for a in plan.arguments if a.role == Role.BATCH.value and a.shape]
    rows = max((a.shape[0] for a in batch), default=0)
    sizes = [n for n in plan.mesh.sizes if n > 1] or [1]
    count = plan.device_count
    if not plan.is_one_program or rows < count or any(rows % n == 0 for n in sizes):
        return None
    fewer = rows // count * count
    return (
        f"no axis of ({plan.mesh}) divides the batch's {rows} rows, so that they are not sharded: "
        f"{fewer} or {fewer + count} rows would be"
    )


def _is_whole(plan: Plan) -> bool:
    """True if each of several devices holds, and so does, all of one program."""
    laid = [*(a.sharding for a in plan.arguments), *(s for _, s in plan.sharding.values)]
    return plan.is_one_program and plan.device_count > 1 and all(s.is_replicated for s in laid)


def _stages_text(plan: Plan) -> str:
    """Into how many stages and microbatches the step is cut, and what runs them."""
    submeshes, microbatches = len(plan.submeshes), f"{plan.microbatches} microbatches"
    joined = ", as one program" if plan.is_spmd_pipeline else ""
    if submeshes == 1:
        return f"one, {microbatches} with gradient accumulation{joined}"
    chunks = "" if len(plan.stages) == submeshes else f" on {submeshes} submeshes"
    return f"{len(plan.stages)}{chunks}, {microbatches}, {plan.schedule}{joined}"


def _compared_by(plan: Plan) -> tuple[str, str]:
    """The measure by which recipes are beside a plan, in words and at the head of a column.

    The cost is what the solver minimizes: seconds of all compute and communication, with no
    overlap. Plans of stages are compared by the predicted step.
    """
    return ("cost", "cost") if plan.is_one_program else ("predicted seconds", "step")


def margins(plan: Plan) -> RenderableType:
    """The costs of textbook strategies on the plan's mesh, the cheapest first."""
    ours: Row = {"name": "this plan", "seconds": plan.outcome.seconds}
    others = recipe_rows(plan)
    measure, head = _compared_by(plan)
    columns = {"method": "name", f">{head}": "seconds", ">more": "more_share", "~note": "note"}
    title = f"Textbook recipes on the same mesh, by {measure}"
    rows = [{**row, "note": "" if row["note"] == _PLANNED else row["note"]} for row in others]
    return Table.of(title, columns, [ours, *rows], lead=3)


def margins_line(plan: Plan) -> Text:
    """The same in a line or two, without why some are impossible."""
    best, rows = plan.outcome.seconds, recipe_rows(plan)
    words = ", ".join(
        f"{r['name']} {cell_of('seconds', r['seconds'])} ({cell_of('more_share', r['more_share'])})"
        for r in rows
        if r["seconds"] is not None
    )
    none = ", ".join(str(r["name"]) for r in rows if r["seconds"] is None)
    head = f"recipes by {_compared_by(plan)[0]} (this plan {show_seconds(best)}): "
    return Text.assemble((head, QUIET), words, (f"; no plan: {none}" if none else "", QUIET))


def collectives(plan: Plan) -> RenderableType:
    """The collectives of a step by kind and axes, the costliest first."""
    found = costliest(plan)
    if not found:
        return no_collectives(plan)
    whole = sum(t.seconds for t in found)
    rows: list[Row] = [
        {**traffic_row(t), "share": t.seconds / whole if whole > 0 else 0.0} for t in found
    ]
    count, nbytes = sum(t.count for t in found), sum(t.nbytes for t in found)
    total: Row = {"kind": "all", "count": count, "bytes": nbytes, "seconds": whole}
    columns = {
        "kind": "kind", "axes": "axes", ">runs": "count", ">bytes": "bytes", ">time": "seconds",
        ">share": "share",
    }  # fmt: skip
    return Table.of(collectives_title(plan), columns, rows, total if len(rows) > 1 else None)


def parameters(
    plan: Plan, shown: int | None = _SHOWN, uses: Sequence[AxisUse] = ()
) -> RenderableType:
    """The step's arguments with their shardings, the largest first; all, by path, for None.

    With `uses`, what the axes that each lies over are used for.
    """
    found = rows_of(plan)
    kept = sorted(found, key=lambda r: r.path) if shown is None else found[:shown]
    cut = len(plan.submeshes) > 1
    roles = roles_of(uses)
    rows: list[tuple[Cell, ...]] = []
    for r in kept:
        times = f"{r.count} x " if r.count > 1 else ""
        kind = f"{times}{show_type(r.dtype, r.shape)}"
        meshes = numbers_text(r.submeshes) if cut else ""
        spec = Text(r.spec, style=QUIET if r.spec == "P()" else "")
        used = axis_roles(r.sharding, r.role, r.submeshes[0], roles)
        rows.append((r.path, kind, r.role, meshes, spec, used, show_bytes(r.local_bytes)))
    columns = ("/path", "type", "kind", "mesh", "sharding", "axis roles", ">a device")
    table = Table("Arguments and their shardings", columns, rows)
    return Group(table, *rest(len(found) - len(rows), "autopar show --params lists {}"))


# -- stages ----------------------------------------------------------------------------------------

_MOST_LINES = 24
_COLUMNS = (
    "forward, backward: one microbatch · once: gradient reductions and update, at the end of a "
    "step · memory: the peak of one device"
)
_REMATS = {
    Remat.SELECTIVE: "all of the forward but products with parameters is",
    Remat.FULL: "the forward is",
}


def pipeline(plan: Plan, simulation: Simulation | None = None) -> RenderableType:
    """The stages of a plan, and with its simulation the schedule that runs them, in time."""
    parts: list[RenderableType] = [_stages(plan), *_notes(plan)]
    if simulation is not None and len(plan.submeshes) > 1:
        grid = simulation.grid
        picture, clock = in_clock(simulation.picture)
        parts += ["", Drawing(picture, _MOST_LINES, clock), legend(grid.kinds, grid.chunks)]
    return Group(*parts)


def _stages(plan: Plan) -> Table:
    uneven = len({s.mesh for s in plan.submeshes}) > 1  # else the headline has said it
    rows: list[tuple[Cell, ...]] = []
    for number, stage in enumerate(plan.stages):
        mesh = f" {plan.submeshes[stage.submesh].mesh}" if uneven else ""
        rows.append(
            (
                f"S{number}",
                stage.name or ("all" if len(plan.stages) == 1 else IN_STEP),
                str(stage.layers),
                Text.assemble(f"mesh{stage.submesh}", (mesh, QUIET)),
                show_seconds(stage.forward_seconds),
                show_seconds(stage.backward_seconds),
                show_seconds(stage.once_seconds),
                show_bytes(stage.peak_bytes),
            )
        )
    columns = (
        "stage", "/modules", ">layers", "submesh", ">forward", ">backward", ">once", ">memory"
    )  # fmt: skip
    return Table(_title(plan), columns, rows, lead=4)


def _title(plan: Plan) -> str:
    batch = f"{plan.microbatches} microbatches of {plan.batch // plan.microbatches} rows"
    if len(plan.submeshes) == 1:
        return f"One stage: {batch}, one after the other"
    waits, whole = plan.prediction.bubble_seconds, plan.outcome.seconds
    bubble = f"bubble {show_seconds(waits)} ({percent(waits / whole if whole > 0 else 0.0)})"
    return f"Stages under {plan.schedule}: {batch}, {bubble}"


def _notes(plan: Plan) -> Iterator[Text]:
    yield Text(_COLUMNS, style=QUIET)
    for remat, what in _REMATS.items():
        stages = [f"S{i}" for i, stage in enumerate(plan.stages) if stage.remat is remat]
        if stages:
            yield Text(f"{', '.join(stages)}: {what} recomputed in the backward pass")
    for note in plan.notes:
        yield Text(f"microbatches: {note}", style=QUIET)
    if plan.is_spmd_pipeline:
        yield Text(SPMD_TICKS, style=QUIET)


# -- memory ----------------------------------------------------------------------------------------


def memory(plan: Plan) -> Table:
    """The bytes that one device holds at the peak of the step."""
    peak, given = plan.prediction.peak_bytes, plan.prediction.argument_bytes
    limit = plan.origin.memory_bytes
    held = [
        (h.what, show_bytes(h.nbytes), show_bytes(h.local_bytes), percent(h.local_bytes / limit))
        for h in holdings_of(plan)
    ]
    rest = max(0, peak - given)
    others = ("activations, gradients, temporaries", "", show_bytes(rest), percent(rest / limit))
    return Table(
        f"Memory of a device at the peak; limit {show_bytes(limit)}",
        ("/what", ">whole", ">a device", ">share"),
        [*held, others],
        ("peak", "", show_bytes(peak), percent(peak / limit)),
    )


def memory_in_full(plan: Plan, curves: Sequence[MemoryCurve] = ()) -> RenderableType:
    """The bytes of a device over the step, the largest values at the peak, a byte's price."""
    parts: list[RenderableType] = [memory(plan)]
    peak = plan.prediction.peak
    if curves:
        parts += ["", memory_over_time(curves)]
    if peak is not None:
        parts += ["", _kinds(peak), "", _largest(peak), "", peak_text(peak)]
    return Group(*parts, _price(plan))


def peak_text(peak: Peak) -> Text:
    """The moment at which a device holds the most, in one line."""
    return Text.assemble(("peak ", QUIET), str(peak))


def _kinds(peak: Peak) -> Table:
    whole = sum(nbytes for _, nbytes in peak.totals) or 1
    rows = [
        (kind.value, show_bytes(nbytes), percent(nbytes / whole))
        for kind, nbytes in sorted(peak.totals, key=lambda t: -t[1])
    ]
    return Table("Memory at the peak, by kind", ("kind", ">a device", ">share"), rows)


def _largest(peak: Peak) -> Table:
    rows = [
        (
            i.name, i.kind.value, show_type(i.dtype, i.shape),
            spec_text(i.sharding), show_bytes(i.local_bytes), i.line,
        )
        for i in peak.items
    ]  # fmt: skip
    columns = ("/what", "kind", "type", "sharding", ">a device", "made")
    return Table("The largest values at the peak", columns, rows)


def _price(plan: Plan) -> Text:
    saved = price_per_gib(plan)
    if saved <= 0:
        return Text("more memory would not make the step faster", style=QUIET)
    return Text.assemble(("one more GiB ", QUIET), f"would save about {show_seconds(saved)} a step")
