"""A plan drawn for a terminal: headline, collectives, parameters, memory."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cluster import Cluster
from autopar.ir.outcome import Status
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.plan import Plan
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.style import ACCENT, GOOD, QUIET, SlashedPath, bar, facts, percent, plain_table
from autopar.report.view import exposed_share, rows_of

_SHOWN = 12


def headline(plan: Plan) -> RenderableType:
    """What was planned for what, how sure the answer is, and what it should take."""
    o, p, outcome = plan.origin, plan.prediction, plan.outcome
    shape = str(plan.mesh) if plan.pipeline is None else _submeshes(plan.pipeline)
    mesh = Text(shape) + Text(f"  ({plan.device_count} devices)", style=QUIET)
    proven = outcome.status is not Status.FEASIBLE
    bound = show_seconds(outcome.bound_seconds)
    within = f"within {outcome.gap:.2%} of the bound {bound}. "
    if plan.pipeline is not None:  # a bound for these stages, not for all that there might be
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
    if plan.pipeline is not None:
        pairs.insert(2, ("stages", _cut(plan, plan.pipeline)))
    source = Cluster.from_toml_text(o.cluster, "the plan's cluster").chip.source
    pairs.append(("figures", f"{source.what} ({source.date}, {source.confidence})"))
    title = Text.assemble(
        ("plan ", QUIET),
        (o.step, f"bold {ACCENT}"),
        (" on ", QUIET),
        (o.cluster_name, f"bold {ACCENT}"),
    )
    return Group(title, facts(pairs))


def _cut(plan: Plan, pipeline: PipelinePlan) -> str:
    """Into how many stages and microbatches the step is cut, and what runs them."""
    submeshes, microbatches = len(pipeline.submeshes), f"{plan.microbatches} microbatches"
    if submeshes == 1:
        return f"one, {microbatches}: gradients add up over them"
    chunks = "" if plan.stage_count == submeshes else f" on {submeshes} submeshes"
    return f"{plan.stage_count}{chunks}, {microbatches}, {pipeline.schedule}"


def _submeshes(plan: PipelinePlan) -> str:
    """Equal meshes together: 4 x (data=2)."""
    meshes = [str(s.mesh) for s in plan.submeshes]
    if len(meshes) == 1:
        return meshes[0]
    return " + ".join(f"{meshes.count(m)} x ({m})" for m in dict.fromkeys(meshes))


def margins(plan: Plan) -> RenderableType:
    """What the textbook strategies would cost on the plan's mesh, the cheapest first."""
    table = plain_table("Recipes beside this plan", "method", ">time", ">more", "~note")
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


def collectives(plan: Plan) -> RenderableType:
    """Every collective of one step by kind and axes, the costliest first."""
    traffic = sorted(plan.prediction.traffic, key=lambda t: -t.seconds)
    if not traffic:
        where = "" if plan.pipeline is None else " within a stage"
        return Text(f"No collectives{where}: no device waits for another.", style=QUIET)
    table = plain_table(
        "Collectives in a step", "kind", "~axes", ">count", ">bytes", ">time", ">share"
    )
    total = sum(t.seconds for t in traffic)
    for t in traffic:
        share = t.seconds / total if total > 0 else 0.0
        table.add_row(
            t.kind, " + ".join(t.axes), str(t.count), show_bytes(t.nbytes), show_seconds(t.seconds),
            percent(share),
        )  # fmt: skip
    if len(traffic) > 1:
        table.add_section()
        count, nbytes = sum(t.count for t in traffic), sum(t.nbytes for t in traffic)
        table.add_row(
            "all", "", str(count), show_bytes(nbytes), show_seconds(total), "", style="bold"
        )
    return table


def parameters(plan: Plan, shown: int | None = _SHOWN) -> RenderableType:
    """How the step's arguments lie, the largest first; all of them where `shown` is None."""
    rows = rows_of(plan)
    cut = plan.pipeline is not None and len(plan.pipeline.submeshes) > 1
    where = ("mesh",) if cut else ()
    table = plain_table(
        "Arguments and their shardings", "~path", "type", "role", *where, "~sharding", ">a device"
    )
    for r in rows[:shown]:
        times = f"{r.count} x " if r.count > 1 else ""
        kind = f"{times}{r.dtype}[{','.join(map(str, r.shape))}]"
        style = QUIET if r.spec == "P()" else ""
        meshes = (_numbers(r.submeshes),) if cut else ()
        table.add_row(
            SlashedPath(r.path), kind, r.role, *meshes, Text(r.spec, style=style),
            show_bytes(r.local_bytes),
        )  # fmt: skip
    if shown is None or len(rows) <= shown:
        return table
    return Group(table, _rest(rows[shown:]))


def _numbers(numbers: tuple[int, ...]) -> str:
    """Numbers in a row as their first and last: 0..3; others one by one."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}..{last}"
    return ", ".join(map(str, numbers))


def _rest(rows: tuple[object, ...]) -> Text:
    return Text(f"and {len(rows)} smaller rows: autopar show --params lists them", style=QUIET)
