"""A plan as plain rows: what `--json` prints, and what the tables are drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.codec import Json
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.peak import Peak
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.values import Role, item_bytes
from autopar.report.pipeline import pipeline_data


@dataclass(frozen=True)
class Row:
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
    """What one device holds of one kind of tensor, and what the whole of it weighs."""

    what: str
    nbytes: int
    local_bytes: int


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers in a row as their first and last: 0..3; others one by one."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}..{last}"
    return ", ".join(map(str, numbers))


def rows_of(plan: Plan) -> tuple[Row, ...]:
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
        "stages": plan.stage_count,
        "microbatches": plan.microbatches,
        "pins": {
            pattern: spec_text(Sharding(tuple(tuple(axes) for axes in dims)))
            for pattern, dims in o.pins
        },
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
        "pipeline": pipeline_data(plan.pipeline) if plan.pipeline is not None else None,
        "collectives": [
            {"kind": t.kind, "axes": list(t.axes), "count": t.count, "bytes": t.nbytes,
             "seconds": t.seconds}
            for t in plan.prediction.traffic
        ],
        "parameters": _argument_data(plan, plan.arguments),
    }  # fmt: skip


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


def _row(plan: Plan, group: list[Argument]) -> Row:
    first = group[0]
    return Row(
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
    """What one device holds of some arguments, on the submesh that holds most of them."""
    held: dict[int, int] = {}
    for a in group:
        held[a.submesh] = held.get(a.submesh, 0) + a.local_bytes(plan.mesh_of(a))
    return max(held.values())


def _whole_bytes(a: Argument) -> int:
    count = item_bytes(a.dtype)
    for n in a.shape:
        count *= n
    return count
