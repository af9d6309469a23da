"""The contents of a page as one JSON object, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, axis_links
from autopar.cluster.planned import planned_cluster
from autopar.ir.codec import Json
from autopar.ir.compiler_options import options_text
from autopar.ir.inspection import AxisUse, CommRow, Inspection
from autopar.ir.plan import Plan
from autopar.report.clusters import cluster_data
from autopar.report.inspection import as_tree
from autopar.report.rows import (
    SPMD_TICKS,
    ArgumentRow,
    alike_axes,
    by_kind,
    inspection_data,
    meshes_of,
    plan_data,
    recipe_rows,
    rows_of,
)
from autopar.report.trace import TracedSpan
from autopar.schedule.planned import once_seconds_of, simulation_of

# Bytes and seconds are named so at the end of their keys; a share is of one.

MOST_OPS, MOST_COLLECTIVES, MOST_SPANS, MOST_MODULES = 40, 120, 500, 400
MOST_MEMBERS = 8  # values that a collective's row names

Data = dict[str, Json]


@dataclass(frozen=True)
class OtherPlan:
    """A plan to compare with, and what the page calls it."""

    name: str
    plan: Plan


@dataclass(frozen=True)
class ReportView:
    """The contents of a page; the same view gives the same bytes.

    `measured` are the spans of a step that was traced, `verification` what `autopar verify --json`
    printed; both may be missing. `made_by` is the autopar that draws it, with its version.
    """

    plan: Plan
    inspection: Inspection
    made_by: str
    others: tuple[OtherPlan, ...] = ()
    measured: tuple[TracedSpan, ...] = ()
    verification: dict[str, Json] | None = None


def report_data(view: ReportView) -> Data:
    """The data of a page: the plan's, what it means, and what stands beside it."""
    plan, found = view.plan, view.inspection
    cluster = planned_cluster(plan)
    return {
        "made_by": view.made_by,
        "plan": plan_summary(plan),
        "cluster": cluster_data(cluster),
        **inspection_data(_few(found)),
        "alike": [len(c.members) for c in found.collectives[:MOST_COLLECTIVES]],
        "axes": list(_axes(found.axes, plan, cluster)),
        "found": {
            "modules": len(found.modules),
            "ops": len(found.ops),
            "collectives": len(found.collectives),
            "kernels": len(found.spans),
        },
        "traffic": list(_traffic(found.collectives)),
        "schedule": _schedule(plan),
        "recipes": [*recipe_rows(plan)],
        "others": [_other(o, plan) for o in (OtherPlan("this plan", plan), *view.others)],
        "measured": _measured(view.measured),
        "verification": view.verification,
    }


def _few(found: Inspection) -> Inspection:
    """The same with as much as a page can hold: the costliest first, kernels in time."""
    longest = sorted(found.spans, key=lambda s: s.start_seconds - s.end_seconds)[:MOST_SPANS]
    return replace(
        found,
        modules=tuple(as_tree(found.modules[:MOST_MODULES])),
        ops=tuple(sorted(found.ops, key=lambda o: -o.seconds)[:MOST_OPS]),
        collectives=tuple(
            replace(c, members=c.members[:MOST_MEMBERS])
            for c in found.collectives[:MOST_COLLECTIVES]
        ),
        spans=tuple(sorted(longest, key=lambda s: (s.start_seconds, s.stream))),
    )


def plan_summary(plan: Plan) -> Data:
    """The plan's own data with its parameters folded: a model of 1,000 layers has 36,000."""
    data = plan_data(plan)
    again = plan.recomputation
    p = plan.prediction
    data["parameters"] = [_parameter(rows) for rows in mirrored(plan)]
    data["recomputed"] = {
        "value_count": len(again.values), "seconds": again.seconds, "saved_bytes": again.saved_bytes
    }  # fmt: skip
    data["compiled_with"] = options_text(plan.compiler_options)
    data["spmd_ticks"] = SPMD_TICKS if plan.is_spmd_pipeline else ""
    data["hidden_seconds"] = max(0.0, p.communication_seconds - p.exposed_seconds)
    data["exposed_share"] = p.exposed_seconds / p.seconds if p.seconds > 0 else 0.0
    data["memory_share"] = p.peak_bytes / plan.origin.memory_bytes
    data["meshes"] = [*meshes_of(plan)]
    data["sent_bytes"] = sum(t.nbytes for t in p.traffic)
    return data


def _parameter(rows: tuple[ArgumentRow, ...]) -> Json:
    """A row with its mirrors: counts and bytes are of all of them."""
    first, *mirrors = rows
    suffix = suffix_of(first)
    return {
        "path": first.path,
        "mirrors": [m.path.removesuffix(suffix).rstrip("/") for m in mirrors],
        "count": sum(r.count for r in rows),
        "shape": list(first.shape),
        "dtype": first.dtype,
        "role": first.role,
        "sharding": first.spec,
        "bytes": sum(r.nbytes for r in rows),
        "local_bytes": sum(r.local_bytes for r in rows),
        "submeshes": list(first.submeshes),
    }


def _axes(uses: Iterable[AxisUse], plan: Plan, cluster: Cluster) -> Iterator[Json]:
    """The axes, those of several submeshes that are used alike as one."""
    for group in alike_axes(uses):
        first = group[0]
        links = axis_links(cluster, plan.mesh, [first.axis]) if plan.is_one_program else ()
        rate = min((level.bytes_per_second for level in links), default=0.0)
        yield {
            "submeshes": [use.submesh for use in group],
            "axis": first.axis,
            "size": first.size,
            "roles": [role.value for role in first.roles],
            "evidence": list(first.evidence),
            "crosses": [level.name for level in links],
            "bytes_per_second": rate or None,
        }


def _traffic(rows: Sequence[CommRow]) -> Iterator[Json]:
    """Collectives by submesh, kind and axes, the costliest of each submesh first."""
    for submesh in sorted({row.submesh for row in rows}):
        for (kind, axes), group in by_kind([r for r in rows if r.submesh == submesh]).items():
            yield {
                "submesh": submesh,
                "axes": list(axes),
                "kind": kind,
                "roles": list(dict.fromkeys(role.value for c in group for role in c.roles)),
                "runs": sum(c.runs for c in group),
                "bytes": sum(c.total_bytes for c in group),
                "seconds": sum(c.seconds for c in group),
                "exposed_seconds": sum(c.exposed_seconds for c in group),
                "hidden_seconds": sum(c.hidden_seconds for c in group),
            }


def _schedule(plan: Plan) -> Json:
    """The simulated schedule of a plan with stages: what each submesh does and when it waits."""
    if plan.is_one_program:
        return None
    simulation, once = simulation_of(plan), once_seconds_of(plan)
    rows = zip(simulation.busy_seconds, once, simulation.peak_in_flight, strict=True)
    whole = plan.prediction.seconds
    return {
        "loop_seconds": simulation.makespan_seconds,
        "bubble_share": plan.prediction.bubble_seconds / whole if whole > 0 else 0.0,
        "devices": [
            {
                "loop_seconds": busy,
                "once_seconds": late,
                "waiting_seconds": max(0.0, whole - busy - late),
                "peak_in_flight": held,
                "activation_bytes": nbytes,
            }
            for (busy, late, held), nbytes in zip(rows, simulation.peak_bytes, strict=True)
        ],
    }


def _other(other: OtherPlan, ours: Plan) -> Json:
    plan, p = other.plan, other.plan.prediction
    whole = ours.prediction.seconds
    return {
        "name": other.name,
        "cluster": plan.origin.cluster_name,
        "method": plan.origin.method,
        "meshes": [*meshes_of(plan)],
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "devices": plan.device_count,
        "seconds": p.seconds,
        "more_share": p.seconds / whole - 1 if whole > 0 else 0.0,
        "work_seconds": p.compute_seconds,
        "exposed_seconds": p.exposed_seconds,
        "sent_bytes": sum(t.nbytes for t in p.traffic),
        "peak_bytes": p.peak_bytes,
        "limit_bytes": plan.origin.memory_bytes,
        "gap": plan.outcome.gap,
    }


def _measured(spans: tuple[TracedSpan, ...]) -> Json:
    if not spans:
        return None
    start, end = min(s.start_seconds for s in spans), max(s.end_seconds for s in spans)
    return {
        "step_seconds": end - start,
        "spans": [
            [s.submesh, s.kind, s.stage, s.microbatch, s.start_seconds, s.end_seconds, s.name]
            for s in spans
        ],
    }


# -- parameters with what mirrors them -------------------------------------------------------------


def mirrored(plan: Plan) -> tuple[tuple[ArgumentRow, ...], ...]:
    """The step's arguments by row; after a parameter's row those that mirror it.

    A mirror holds tensors of the same paths and types that lie the same: opt_state/mu/x of
    params/x.
    """
    rows = rows_of(plan)
    parameters = {_key(row, suffix): row for row in rows if (suffix := suffix_of(row))}
    found: dict[ArgumentRow, list[ArgumentRow]] = {}
    for row in rows:
        keys = (_key(row, row.path.split("/", i)[-1]) for i in range(1, row.path.count("/") + 1))
        own = next((parameters[key] for key in keys if key in parameters), row)
        found.setdefault(own, [own])
        if own is not row:
            found[own].append(row)
    return tuple(map(tuple, found.values()))


def suffix_of(row: ArgumentRow) -> str:
    """The path within the tree of parameters or the flax nnx module, "" for what is in none."""
    before, found, after = f"/{row.path}".partition("/params/")
    if found:
        return after if "/" not in before.strip("/") else ""
    root, *inside = row.path.split("/")
    is_variable = bool(root) and inside[-1:] == ["value"] and "opt_state" not in inside
    return "/".join(inside) if is_variable else ""


def _key(row: ArgumentRow, path: str) -> tuple[object, ...]:
    """The part that two rows which mirror each other share."""
    return path, row.shape, row.dtype, row.sharding, row.count, row.submeshes
