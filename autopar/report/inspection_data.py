"""What a plan means as JSON: the rows of an inspection and what their tables add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import cast

from autopar.ir.codec import Json
from autopar.ir.inspection import WHOLE_STEP, CommRow, Inspection, Level, Spot
from autopar.ir.sharding import Sharding, spec_text
from autopar.report.comm import by_kind, hidden_share
from autopar.schedule.simulate import Simulation


def inspection_data(found: Inspection) -> dict[str, Json]:
    """Every row with its fields; seconds, bytes, FLOP and PartitionSpec text."""
    kinds = by_kind(found.collectives).items()
    return {
        **cast("dict[str, Json]", _plain(found)),
        "ops_total": {
            "runs": sum(r.runs for r in found.ops),
            "flops": sum(r.flops for r in found.ops),
            "seconds": sum(r.seconds for r in found.ops),
        },
        "collectives_total": _sums(found.collectives),
        "collectives_by_kind": [
            {"kind": kind, "axes": list(axes), **_sums(group)} for (kind, axes), group in kinds
        ],
        "memory_peaks": [
            {"submesh": c.submesh, "level": c.peak, "bytes": c.levels[c.peak].nbytes}
            for c in found.memory
            if c.levels
        ],
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


def _plain(value: object) -> Json:
    """A row or what is in it: by field, kinds by their words, shardings as users write them."""
    if isinstance(value, Sharding):
        return {"spec": spec_text(value), "partial": list(value.partial)}
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Level):
        kinds: Json = {kind.value: nbytes for kind, nbytes in value.by_kind}
        return {"seconds": value.seconds, "label": value.label, "bytes_by_kind": kinds}
    if is_dataclass(value):
        found = {f.name.replace("nbytes", "bytes"): _of(value, f.name) for f in fields(value)}
        return {**found, **_derived(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return cast("Json", value)


def _of(row: object, name: str) -> Json:
    value = getattr(row, name)
    return None if isinstance(row, Spot) and value == WHOLE_STEP else _plain(value)


def _derived(row: object) -> dict[str, Json]:
    if not isinstance(row, CommRow):
        return {}
    return {"hidden_seconds": row.hidden_seconds, "hidden_share": hidden_share([row])}


def _sums(rows: Sequence[CommRow]) -> dict[str, Json]:
    return {
        "runs": sum(r.runs for r in rows),
        "bytes": sum(r.total_bytes for r in rows),
        "seconds": sum(r.seconds for r in rows),
        "hidden_share": hidden_share(rows),
    }
