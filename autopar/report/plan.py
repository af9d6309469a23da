"""A plan drawn for a terminal: headline, collectives, parameters, memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cluster.planned import planned_cluster
from autopar.ir.inspection import AxisUse
from autopar.ir.outcome import Status
from autopar.ir.plan import Plan
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.axes import axis_roles, roles_of
from autopar.report.listing import Cell, Listing
from autopar.report.style import ACCENT, GOOD, QUIET, bar, facts, percent, plain_table
from autopar.report.view import exposed_share, numbers_text, rows_of

_SHOWN = 6

# What the solver makes small is not the time that is predicted, in which wires run beside work.
_MARGINS = "Recipes beside this plan, by the solver's sum"
_ALL_ALIKE = "nothing is sharded: all {} devices do the same work; autopar lint may tell why"


def headline(plan: Plan) -> RenderableType:
    """What was planned for what, how sure the answer is, and what it should take."""
    o, p, outcome = plan.origin, plan.prediction, plan.outcome
    shape = _submeshes(plan)
    mesh = Text(shape) + Text(f"  ({plan.device_count} devices)", style=QUIET)
    proven = outcome.status is not Status.FEASIBLE
    bound = show_seconds(outcome.bound_seconds)
    cost = show_seconds(outcome.seconds)
    within = f"by the solver's sum {cost}, within {outcome.gap:.2%} of the bound {bound}. "
    if outcome.bound_seconds <= 0:
        within = f"by the solver's sum {cost}; no bound was proven. "
    if not plan.is_one_program:  # a bound for these stages, not for all that there might be
        within = f"within {outcome.gap:.2%} of {bound}, which its busiest device works. "
    solved = Text.assemble(
        (outcome.status.value, f"bold {GOOD if proven else 'yellow'}"),
        f"  {within}",
        (outcome.sentence, QUIET),
    )
    predicted = Text.assemble(
        (show_seconds(p.seconds), "bold"),
        f" a step, {percent(exposed_share(plan))} waits for communication ",
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
        ("memory", memory + bar(share) + Text(f" {percent(share)}", style=QUIET)),
    ]
    if p.peak is not None:
        pairs.append(("peak", Text(str(p.peak))))
    if _is_whole(plan):
        pairs.append(("note", Text(_ALL_ALIKE.format(plan.device_count), style="yellow")))
    if not plan.is_one_program:
        pairs.insert(2, ("stages", _cut(plan)))
    source = planned_cluster(plan).chip.source
    pairs.append(("figures", f"{source.what} ({source.date}, {source.confidence})"))
    title = Text.assemble(
        ("plan ", QUIET),
        (o.step, f"bold {ACCENT}"),
        (" on ", QUIET),
        (o.cluster_name, f"bold {ACCENT}"),
    )
    return Group(title, facts(pairs))


def _is_whole(plan: Plan) -> bool:
    """Whether each of several devices holds, and so does, all of one program."""
    laid = [*(a.sharding for a in plan.arguments), *(s for _, s in plan.sharding.values)]
    return plan.is_one_program and plan.device_count > 1 and all(s.is_replicated for s in laid)


def _cut(plan: Plan) -> str:
    """Into how many stages and microbatches the step is cut, and what runs them."""
    submeshes, microbatches = len(plan.submeshes), f"{plan.microbatches} microbatches"
    if submeshes == 1:
        return f"one, {microbatches}: gradients add up over them"
    chunks = "" if len(plan.stages) == submeshes else f" on {submeshes} submeshes"
    return f"{len(plan.stages)}{chunks}, {microbatches}, {plan.schedule}"


def _submeshes(plan: Plan) -> str:
    """Equal meshes together: 4 x (data=2)."""
    meshes = [str(s.mesh) for s in plan.submeshes]
    if len(meshes) == 1:
        return meshes[0]
    return " + ".join(f"{meshes.count(m)} x ({m})" for m in dict.fromkeys(meshes))


def margins(plan: Plan) -> RenderableType:
    """What the textbook strategies would cost on the plan's mesh, the cheapest first."""
    table = plain_table(_MARGINS, "method", ">sum", ">more", "~note")
    table.add_row("this plan", show_seconds(plan.outcome.seconds), "", "")
    found = sorted(
        plan.outcome.recipes, key=lambda m: m.seconds if m.seconds is not None else float("inf")
    )
    for m in found:
        if m.seconds is None:
            table.add_row(m.name, "", "", Text(m.note, style=QUIET))
            continue
        more = m.seconds / plan.outcome.seconds - 1 if plan.outcome.seconds > 0 else 0.0
        table.add_row(m.name, show_seconds(m.seconds), f"{more:+.0%}", Text(m.note, style=QUIET))
    return table


def margins_line(plan: Plan) -> Text:
    """The same in a line or two, without why some are impossible."""
    found = sorted((m.seconds, m.name) for m in plan.outcome.recipes if m.seconds is not None)
    best = plan.outcome.seconds
    words = ", ".join(
        f"{name} {show_seconds(s)} ({s / best - 1 if best > 0 else 0.0:+.0%})" for s, name in found
    )
    none = ", ".join(m.name for m in plan.outcome.recipes if m.seconds is None)
    head = f"recipes by the solver's sum, this plan {show_seconds(best)}: "
    return Text.assemble((head, QUIET), words, (f"; no plan: {none}" if none else "", QUIET))


def collectives(plan: Plan) -> RenderableType:
    """Every collective of one step by kind and axes, the costliest first."""
    traffic = sorted(plan.prediction.traffic, key=lambda t: -t.seconds)
    if not traffic:
        where = "" if plan.is_one_program else " within a stage"
        return Text(f"No collectives{where}: no device waits for another.", style=QUIET)
    whole = sum(t.seconds for t in traffic)
    rows = [
        (
            t.kind, " + ".join(t.axes), str(t.count), show_bytes(t.nbytes),
            show_seconds(t.seconds), percent(t.seconds / whole if whole > 0 else 0.0),
        )
        for t in traffic
    ]  # fmt: skip
    count, nbytes = sum(t.count for t in traffic), sum(t.nbytes for t in traffic)
    total = ("all", "", str(count), show_bytes(nbytes), show_seconds(whole), "")
    return Listing(
        "Collectives in a step",
        ("kind", "axes", ">runs", ">bytes", ">time", ">share"),
        rows,
        total if len(rows) > 1 else (),
    )


def parameters(
    plan: Plan, shown: int | None = _SHOWN, uses: Sequence[AxisUse] = ()
) -> RenderableType:
    """How the step's arguments lie, the largest first, or, where `shown` is None, all by path.

    With `uses`, what the axes that each lies over are used for.
    """
    found = rows_of(plan)
    kept = sorted(found, key=lambda r: r.path) if shown is None else found[:shown]
    cut = len(plan.submeshes) > 1
    roles = roles_of(uses)
    rows: list[tuple[Cell, ...]] = []
    for r in kept:
        times = f"{r.count} x " if r.count > 1 else ""
        kind = f"{times}{r.dtype}[{','.join(map(str, r.shape))}]"
        meshes = numbers_text(r.submeshes) if cut else ""
        spec = Text(r.spec, style=QUIET if r.spec == "P()" else "")
        used = axis_roles(r.sharding, r.role, r.submeshes[0], roles)
        rows.append((r.path, kind, r.role, meshes, spec, used, show_bytes(r.local_bytes)))
    columns = ("/path", "type", "kind", "mesh", "sharding", "axis roles", ">a device")
    table = Listing("Arguments and their shardings", columns, rows)
    return Group(table, *_rest(len(found) - len(rows)))


def _rest(count: int) -> tuple[Text, ...]:
    words = f"and {count} more rows: autopar show --params lists them"
    return (Text(words, style=QUIET),) if count else ()
