"""The rows of a plan, declared once: `--json` prints them, the tables and the page draw them.

Bytes and seconds are named so at the end of their keys, which is how a drawing tells the unit; a
share is of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import cast

from autopar.ir.codec import Json
from autopar.ir.inspection import (
    WHOLE_STEP,
    AxisRole,
    AxisUse,
    CommRow,
    Inspection,
    MemoryLevel,
    OpRow,
    Spot,
)
from autopar.ir.listing import Traffic, kind_order
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.peak import Peak
from autopar.ir.plan import Argument, Plan, PlannedStage
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.values import Role, item_bytes
from autopar.schedule.simulate import Simulation

Row = dict[str, Json]


@dataclass(frozen=True)
class ArgumentRow:
    """Arguments that lie alike and whose paths differ in numbers only, as one line.

    `nbytes` and `local_bytes` are of all of them together: whole, and of one device's pieces, where
    they are most. `submeshes` are where they lie, by number.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    role: str
    spec: str
    nbytes: int
    local_bytes: int
    submeshes: tuple[int, ...]
    sharding: Sharding


@dataclass(frozen=True)
class Holding:
    """Bytes of one kind of tensor on one device, and of the whole of it."""

    what: str
    nbytes: int
    local_bytes: int


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers in a row as their first and last: 0..3; others one by one."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}..{last}"
    return ", ".join(map(str, numbers))


def rows_of(plan: Plan) -> tuple[ArgumentRow, ...]:
    """The step's arguments, those that lie alike folded into one row, the largest first."""
    groups: dict[tuple[object, ...], list[Argument]] = {}
    for a in plan.arguments:
        key = (unnumbered(a.path), a.shape, a.dtype, a.role, a.sharding)
        groups.setdefault(key, []).append(a)
    rows = [_row(plan, group) for group in groups.values()]
    return tuple(sorted(rows, key=lambda r: (-r.nbytes, len(r.path), r.path)))


def holdings_of(plan: Plan) -> tuple[Holding, ...]:
    """A device's arguments by the first two parts of their paths, then all that is not one."""
    groups: dict[str, list[Argument]] = {}
    for a in plan.arguments:
        depth = 2 if a.role == Role.STATE.value else 1
        groups.setdefault("/".join(a.path.split("/")[:depth]), []).append(a)
    held = [
        Holding(
            what,
            sum(_whole_bytes(a) for a in group),
            _local_bytes(plan, group),
        )
        for what, group in groups.items()
    ]
    return tuple(sorted(held, key=lambda h: (-h.local_bytes, h.what)))


def plan_data(plan: Plan) -> dict[str, Json]:
    """A plan's decisions and predictions as one JSON object; seconds, bytes and PartitionSpecs."""
    o, p, outcome = plan.origin, plan.prediction, plan.outcome
    return {
        "step": o.step,
        "cluster": o.cluster_name,
        "devices": plan.device_count,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "method": o.method,
        "jax": o.jax_minor,
        "layers": plan.layer_count,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "pins": {
            pattern: spec_text(Sharding(tuple(tuple(axes) for axes in dims)))
            for pattern, dims in o.pins
        },
        "compiler_options": dict(plan.compiler_options),
        "outcome": {
            "status": outcome.status.value,
            "seconds": outcome.seconds,
            "bound_seconds": outcome.bound_seconds,
            "gap": outcome.gap,
            "sentence": outcome.sentence,
            "recipes": [
                {"name": m.name, "seconds": m.seconds, "note": m.note} for m in outcome.recipes
            ],
        },
        "predicted": {
            "seconds": p.seconds,
            "compute_seconds": p.compute_seconds,
            "communication_seconds": p.communication_seconds,
            "exposed_communication_seconds": p.exposed_seconds,
            "exposed_communication_share": exposed_share(plan),
            **rate_data(plan),
        },
        "memory": {
            "argument_bytes": p.argument_bytes,
            "peak_bytes": p.peak_bytes,
            "other_bytes": max(0, p.peak_bytes - p.argument_bytes),
            "limit_bytes": o.memory_bytes,
            "held": [
                {"what": h.what, "bytes": h.nbytes, "local_bytes": h.local_bytes}
                for h in holdings_of(plan)
            ],
            "peak": _peak_data(p.peak),
            "price_seconds_per_gib": price_per_gib(plan),
        },
        "pipeline": pipeline_data(plan) if not plan.is_one_program else None,
        "collectives": [traffic_row(t) for t in costliest(plan)],
        "parameters": _argument_data(plan, plan.arguments),
    }  # fmt: skip


def rate_data(plan: Plan) -> dict[str, Json]:
    """The MFU and the items a second of a plan, and its seconds by what binds them."""
    rate, p = plan.rate(), plan.prediction
    return {
        "model_flops": int(p.model_flops),
        "mfu_share": rate.mfu,
        "item": rate.items,
        "items_per_second": rate.items_per_second,
        "roofline_seconds": dict(p.roofline),
    }


def costliest(plan: Plan) -> list[Traffic]:
    """The collectives of a step by kind and axes, in the order in which all drawings list them."""
    return sorted(plan.prediction.traffic, key=lambda t: -t.seconds)


def traffic_row(t: Traffic) -> Row:
    """The collectives of one kind over the same axes."""
    return {
        "kind": t.kind, "axes": list(t.axes), "count": t.count, "bytes": t.nbytes,
        "seconds": t.seconds,
    }  # fmt: skip


def recipe_rows(plan: Plan) -> list[Row]:
    """The textbook strategies beside the plan, the cheapest first, those that fail last."""
    ours, none = plan.outcome.seconds, float("inf")
    rows: list[Row] = []
    for m in sorted(plan.outcome.recipes, key=lambda m: none if m.seconds is None else m.seconds):
        more = 0.0 if ours <= 0 else (m.seconds or 0.0) / ours - 1
        share = None if m.seconds is None else more
        rows.append({"name": m.name, "seconds": m.seconds, "more_share": share, "note": m.note})
    return rows


def meshes_of(plan: Plan) -> list[str]:
    """The meshes of a plan, equal ones once: 4 x (data=2)."""
    if plan.is_one_program:
        return [str(plan.mesh)]
    meshes = [str(s.mesh) for s in plan.submeshes]
    counts = {mesh: meshes.count(mesh) for mesh in meshes}
    return [f"{n} x ({mesh})" if n > 1 else mesh for mesh, n in counts.items()]


def price_per_gib(plan: Plan) -> float:
    """Seconds that one more GiB a device would save in each step."""
    return plan.outcome.memory_price_seconds_per_byte * 2**30


def _peak_data(peak: Peak | None) -> Json:
    if peak is None:
        return None
    return {
        "op": peak.op,
        "module": peak.module,
        "region": peak.region,
        "line": peak.line,
        "step_share": peak.step_share,
        "bytes_by_kind": {kind.value: nbytes for kind, nbytes in peak.totals},
        "largest": [
            {"name": i.name, "kind": i.kind.value, "shape": list(i.shape), "dtype": i.dtype,
             "sharding": spec_text(i.sharding), "local_bytes": i.local_bytes, "line": i.line}
            for i in peak.items
        ],
    }  # fmt: skip


def exposed_share(plan: Plan) -> float:
    """The share of the predicted step that waits for communication."""
    p = plan.prediction
    return p.exposed_seconds / p.seconds if p.seconds > 0 else 0.0


def _argument_data(plan: Plan, arguments: Iterable[Argument]) -> list[Json]:
    return [
        {
            "path": a.path,
            "shape": list(a.shape),
            "dtype": a.dtype,
            "role": a.role,
            "sharding": spec_text(a.sharding),
            "bytes": _whole_bytes(a),
            "local_bytes": a.local_bytes(plan.mesh_of(a)),
            "submesh": a.submesh,
        }
        for a in sorted(arguments, key=lambda a: (-_whole_bytes(a), a.path))
    ]


def _row(plan: Plan, group: list[Argument]) -> ArgumentRow:
    first = group[0]
    return ArgumentRow(
        path=common_path([a.path for a in group]),
        count=len(group),
        shape=first.shape,
        dtype=first.dtype,
        role=first.role,
        spec=spec_text(first.sharding),
        nbytes=_whole_bytes(first) * len(group),
        local_bytes=_local_bytes(plan, group),
        submeshes=tuple(sorted({a.submesh for a in group})),
        sharding=first.sharding,
    )


def _local_bytes(plan: Plan, group: list[Argument]) -> int:
    """Bytes of some arguments on one device, on the submesh that holds most of them."""
    held: dict[int, int] = {}
    for a in group:
        held[a.submesh] = held.get(a.submesh, 0) + a.local_bytes(plan.mesh_of(a))
    return max(held.values())


def _whole_bytes(a: Argument) -> int:
    count = item_bytes(a.dtype)
    for n in a.shape:
        count *= n
    return count


# -- stages and their schedule ---------------------------------------------------------------------


SPMD_TICKS = (
    "The devices run all stages as one program: in each tick every submesh takes a forward and a "
    "backward at most, and a tick lasts as long as its slowest. The picture is of the same stages "
    "as programs of their own, so it ends before the predicted step does."
)


def pipeline_data(plan: Plan) -> Json:
    """The same as JSON; seconds and bytes."""
    return {
        "schedule": plan.schedule,
        "lowering": plan.lowering,
        "microbatches": plan.microbatches,
        "batch": plan.batch,
        "bubble_seconds": plan.prediction.bubble_seconds,
        "peak_in_flight": list(plan.prediction.peak_in_flight),
        "submeshes": [
            {"mesh": dict(zip(s.mesh.names, s.mesh.sizes, strict=True)), "devices": list(s.devices)}
            for s in plan.submeshes
        ],
        "stages": [stage_row(s) for s in plan.stages],
        "notes": list(plan.notes),
    }


def stage_row(stage: PlannedStage) -> Row:
    """A stage: what it runs, where, and how long a microbatch and a step take it."""
    return {
        "modules": stage.name,
        "layers": stage.layers,
        "submesh": stage.submesh,
        "remat": stage.remat.value,
        "forward_seconds": stage.forward_seconds,
        "input_gradient_seconds": stage.input_gradient_seconds,
        "weight_gradient_seconds": stage.weight_gradient_seconds,
        "backward_seconds": stage.backward_seconds,
        "once_seconds": stage.once_seconds,
        "peak_bytes": stage.peak_bytes,
    }


def schedule_data(done: Simulation) -> dict[str, Json]:
    """A plan's schedule in time: every task of every device, in seconds."""
    return {
        "schedule": done.grid.name,
        "makespan_seconds": done.makespan_seconds,
        "devices": [
            [{"task": str(s.task), "start_seconds": s.start_seconds, "end_seconds": s.end_seconds}
             for s in spans]
            for spans in done.spans
        ],
    }  # fmt: skip


# -- the meaning of a plan -------------------------------------------------------------------------


def inspection_data(found: Inspection) -> dict[str, Json]:
    """The rows of an inspection with their fields; seconds, bytes, FLOP, PartitionSpec text."""
    return {
        **cast("dict[str, Json]", _plain(found)),
        "ops_total": ops_total(found.ops),
        "collectives_total": comm_sums(found.device_collectives),
        "collectives_by_kind": [*kind_rows(found.device_collectives)],
        "memory_peaks": [
            {"submesh": c.submesh, "level": c.peak, "bytes": c.levels[c.peak].nbytes}
            for c in found.memory
            if c.levels
        ],
    }


def ops_total(rows: Sequence[OpRow]) -> Row:
    """Ops added up."""
    return {
        "runs": sum(r.runs for r in rows),
        "flops": sum(r.flops for r in rows),
        "seconds": sum(r.seconds for r in rows),
    }


def alike_axes(uses: Iterable[AxisUse]) -> list[list[AxisUse]]:
    """The axes; those of several submeshes that are used alike stand together."""
    alike: dict[tuple[str, int, tuple[AxisRole, ...]], list[AxisUse]] = {}
    for use in uses:
        alike.setdefault((use.axis, use.size, use.roles), []).append(use)
    return [*alike.values()]


def by_kind(rows: Sequence[CommRow]) -> dict[tuple[str, tuple[str, ...]], list[CommRow]]:
    """Collectives of one kind over the same axes together, the costliest first."""
    groups: dict[tuple[str, tuple[str, ...]], list[CommRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.axes), []).append(row)
    return dict(
        sorted(groups.items(), key=lambda g: (-sum(r.seconds for r in g[1]), kind_order(g[0])))
    )


def kind_rows(rows: Sequence[CommRow]) -> list[Row]:
    """Collectives by kind and axes, the costliest first."""
    return [
        {"kind": kind, "axes": list(axes), **comm_sums(group)}
        for (kind, axes), group in by_kind(rows).items()
    ]


def hidden_share(rows: Sequence[CommRow]) -> float:
    """The share of the time of some collectives that passes beside work."""
    seconds = sum(r.seconds for r in rows)
    return sum(r.hidden_seconds for r in rows) / seconds if seconds > 0 else 0.0


def _plain(value: object) -> Json:
    """A row or what is in it: by field, kinds by their words, shardings as users write them."""
    if isinstance(value, Sharding):
        return {"spec": spec_text(value), "partial": list(value.partial)}
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, MemoryLevel):
        kinds: Json = {kind.value: nbytes for kind, nbytes in value.by_kind}
        return {"seconds": value.seconds, "label": value.label, "bytes_by_kind": kinds}
    if is_dataclass(value):
        row: dict[str, Json] = {}
        for f in fields(value):
            inner = getattr(value, f.name)
            is_nowhere = isinstance(value, Spot) and inner == WHOLE_STEP
            row[f.name.replace("nbytes", "bytes")] = None if is_nowhere else _plain(inner)
        if isinstance(value, CommRow):
            row |= {"hidden_seconds": value.hidden_seconds, "hidden_share": hidden_share([value])}
        return row
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return cast("Json", value)


def comm_sums(rows: Sequence[CommRow]) -> Row:
    """Collectives added up."""
    return {
        "runs": sum(r.runs for r in rows),
        "bytes": sum(r.total_bytes for r in rows),
        "seconds": sum(r.seconds for r in rows),
        "hidden_share": hidden_share(rows),
    }
