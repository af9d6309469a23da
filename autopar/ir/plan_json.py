"""Plans as versioned JSON: data only, checked on reading, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from autopar.errors import PlanFileError
from autopar.ir.assignment import Assignment
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Margin, Outcome, Status
from autopar.ir.peak import HeldItem, HeldKind, Peak
from autopar.ir.plan import FORMAT, Argument, Origin, Plan, Prediction, Traffic
from autopar.ir.recomputation import Recomputation
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
T = TypeVar("T")


def plan_to_json(plan: Plan) -> str:
    """The plan as text: the same plan gives the same bytes."""
    body = _body(plan)
    return json.dumps({"checksum": _checksum(body), **body}, indent=1, ensure_ascii=True) + "\n"


def plan_from_json(text: str, where: str = "the plan") -> Plan:
    """The plan of a text; raises PlanFileError that says what is wrong with it."""
    try:
        data: Json = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(f"{where} is no JSON: {error}. Plan again, or restore it.") from None
    if not isinstance(data, dict) or "format" not in data:
        raise PlanFileError(f"{where} is JSON but no autopar plan: it has no 'format'.")
    if data["format"] != FORMAT:
        raise PlanFileError(
            f"{where} has plan format {data['format']}, but this autopar reads {FORMAT}: plan "
            "again, or use the autopar that wrote it."
        )
    body = {k: v for k, v in data.items() if k != "checksum"}
    if data.get("checksum") != _checksum(body):
        raise PlanFileError(
            f"{where} is damaged: its contents do not match its checksum. Plan again, or "
            "restore it."
        )
    try:
        return _plan(_Reader(body))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanFileError(f"{where} is damaged: {type(error).__name__} {error}") from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan to a temporary file beside `path`, then put it in place."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write(plan_to_json(plan))
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanFileError where there is none or it is damaged."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"cannot read plan {str(path)!r}: {error}") from None
    return plan_from_json(text, f"plan {str(path)!r}")


def _checksum(body: dict[str, Json]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _Shardings:
    """Every distinct sharding once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Sharding, int] = {}

    def number(self, sharding: Sharding) -> int:
        return self._numbers.setdefault(sharding, len(self._numbers))

    def table(self) -> Json:
        return [
            {"dims": [list(axes) for axes in s.dims], "partial": list(s.partial)}
            for s in self._numbers
        ]


def _body(plan: Plan) -> dict[str, Json]:
    shardings = _Shardings()
    sharding, o, p = plan.sharding, plan.origin, plan.prediction
    decided: dict[str, Json] = {
        "values": {name: shardings.number(s) for name, s in sharding.values},
        "assignments": [[list(path), list(a.factors)] for path, a in sharding.assignments],
        "uses": [[n, region, shardings.number(s)] for n, region, s in sharding.uses],
        "shared_partials": [[list(path), list(held)] for path, held in sharding.shared_partials],
    }
    ends: dict[str, Json] = {
        "arguments": [_argument(a, shardings) for a in plan.arguments],
        "outputs": [_argument(a, shardings) for a in plan.outputs],
    }
    return {
        "format": FORMAT,
        "step": o.step,
        "graph": o.graph_key,
        "jax": o.jax_minor,
        "cluster": {
            "name": o.cluster_name,
            "fingerprint": o.cluster_fingerprint,
            "toml": o.cluster,
        },
        "mesh": [[n, s] for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True)],
        "method": o.method,
        "memory_bytes": o.memory_bytes,
        "pins": [[pattern, [list(axes) for axes in dims]] for pattern, dims in o.pins],
        "layers": plan.layer_count,
        "stages": plan.stage_count,
        "microbatches": plan.microbatches,
        "recomputed": {
            "values": list(plan.recomputed),
            "seconds": plan.recomputation.seconds,
            "saved_bytes": plan.recomputation.saved_bytes,
        },
        "outcome": {
            "status": plan.outcome.status.value,
            "seconds": plan.outcome.seconds,
            "bound_seconds": plan.outcome.bound_seconds,
            "sentence": plan.outcome.sentence,
            "recipes": [[m.name, m.seconds, m.note] for m in plan.outcome.recipes],
            "memory_price_seconds_per_byte": plan.outcome.memory_price_seconds_per_byte,
        },
        "prediction": {
            "seconds": p.seconds,
            "communication_seconds": p.communication_seconds,
            "argument_bytes": p.argument_bytes,
            "peak_bytes": p.peak_bytes,
            "peak": _peak(p.peak, shardings),
            "traffic": [
                {"kind": t.kind, "axes": list(t.axes), "count": t.count, "bytes": t.nbytes,
                 "seconds": t.seconds}
                for t in p.traffic
            ],
        },
        **ends,
        **decided,
        "shardings": shardings.table(),
    }  # fmt: skip


def _peak(peak: Peak | None, shardings: _Shardings) -> Json:
    if peak is None:
        return None
    return {
        "op": peak.op,
        "module": peak.module,
        "region": peak.region,
        "line": peak.line,
        "step_share": peak.step_share,
        "bytes_by_kind": [[kind.value, nbytes] for kind, nbytes in peak.totals],
        "largest": [
            [i.name, i.kind.value, list(i.shape), i.dtype, shardings.number(i.sharding),
             i.local_bytes, i.line]
            for i in peak.items
        ],
    }  # fmt: skip


def _argument(a: Argument, shardings: _Shardings) -> Json:
    return [a.path, list(a.shape), a.dtype, a.role, shardings.number(a.sharding)]


class _Reader:
    """A JSON object whose fields are read by type; a wrong type raises TypeError."""

    def __init__(self, data: Json) -> None:
        self._data = _object(data)

    def text(self, key: str) -> str:
        return _typed(self._data[key], str)

    def whole(self, key: str) -> int:
        return _typed(self._data[key], int)

    def number(self, key: str, missing: float | None = None) -> float:
        """The number at a key; where it is not there, `missing` if that is given."""
        if missing is not None and key not in self._data:
            return missing
        value = self._data[key]
        return float(value) if isinstance(value, int) else _typed(value, float)

    def has(self, key: str) -> bool:
        """Whether something other than null is at a key."""
        return self._data.get(key) is not None

    def inner(self, key: str) -> _Reader:
        return _Reader(self._data[key])

    def items(self, key: str, missing: tuple[()] | None = None) -> list[Json]:
        """The list at a key; where it is not there, none if that is allowed."""
        return [] if missing is not None and key not in self._data else _list(self._data[key])

    def pairs(self, key: str) -> list[tuple[str, Json]]:
        return list(_object(self._data[key]).items())


def _typed(value: Json, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
    return value


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} is no object")
    return value


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is no list")
    return value


def _ints(value: Json) -> tuple[int, ...]:
    return tuple(_typed(v, int) for v in _list(value))


def _texts(value: Json) -> tuple[str, ...]:
    return tuple(_typed(v, str) for v in _list(value))


def _row(value: Json, length: int) -> list[Json]:
    row = _list(value)
    if len(row) != length:
        raise ValueError(f"a row of {len(row)} entries should have {length}")
    return row


def _plan(data: _Reader) -> Plan:
    mesh_rows = [_row(r, 2) for r in data.items("mesh")]
    mesh = MeshShape(
        tuple(_typed(n, str) for n, _ in mesh_rows), tuple(_typed(s, int) for _, s in mesh_rows)
    )
    table = [_sharding(_Reader(row)) for row in data.items("shardings")]
    return Plan(
        origin=_origin(data),
        sharding=_sharding_plan(data, mesh, table),
        arguments=tuple(_read_argument(r, table) for r in data.items("arguments")),
        outputs=tuple(_read_argument(r, table) for r in data.items("outputs")),
        prediction=_prediction(data.inner("prediction"), table),
        layer_count=data.whole("layers"),
        stage_count=data.whole("stages"),
        microbatches=data.whole("microbatches"),
        recomputation=_recomputation(data.inner("recomputed")),
    )


def _recomputation(data: _Reader) -> Recomputation:
    return Recomputation(
        _texts(data.items("values")), data.number("seconds"), data.whole("saved_bytes")
    )


def _origin(data: _Reader) -> Origin:
    cluster = data.inner("cluster")
    pins = [_row(r, 2) for r in data.items("pins")]
    return Origin(
        step=data.text("step"),
        graph_key=data.text("graph"),
        cluster=cluster.text("toml"),
        cluster_name=cluster.text("name"),
        cluster_fingerprint=cluster.text("fingerprint"),
        jax_minor=data.text("jax"),
        method=data.text("method"),
        memory_bytes=data.whole("memory_bytes"),
        pins=tuple(
            (_typed(pattern, str), tuple(_texts(axes) for axes in _list(dims)))
            for pattern, dims in pins
        ),
    )


def _sharding(row: _Reader) -> Sharding:
    return Sharding(tuple(_texts(axes) for axes in row.items("dims")), _texts(row.items("partial")))


def _read_argument(value: Json, table: list[Sharding]) -> Argument:
    path, shape, dtype, role, number = _row(value, 5)
    return Argument(
        _typed(path, str), _ints(shape), _typed(dtype, str), _typed(role, str),
        table[_typed(number, int)],
    )  # fmt: skip


def _sharding_plan(data: _Reader, mesh: MeshShape, table: list[Sharding]) -> ShardingPlan:
    outcome = data.inner("outcome")
    uses = [_row(r, 3) for r in data.items("uses")]
    assigned = [_row(r, 2) for r in data.items("assignments")]
    shared = [_row(r, 2) for r in data.items("shared_partials")]
    return ShardingPlan(
        mesh,
        tuple((name, table[_typed(n, int)]) for name, n in data.pairs("values")),
        tuple((_ints(path), Assignment(_ints(factors))) for path, factors in assigned),
        tuple((_typed(n, str), _typed(r, str), table[_typed(s, int)]) for n, r, s in uses),
        tuple((_ints(path), _ints(held)) for path, held in shared),
        Outcome(
            Status(outcome.text("status")),
            outcome.number("seconds"),
            outcome.number("bound_seconds"),
            outcome.text("sentence"),
            tuple(_margin(row) for row in outcome.items("recipes", missing=())),
            outcome.number("memory_price_seconds_per_byte", missing=0.0),
        ),
    )


def _margin(value: Json) -> Margin:
    name, seconds, note = _row(value, 3)
    spent = None if seconds is None else float(_typed(seconds, float))
    return Margin(_typed(name, str), spent, _typed(note, str))


def _prediction(data: _Reader, table: list[Sharding]) -> Prediction:
    rows = [_Reader(r) for r in data.items("traffic")]
    return Prediction(
        seconds=data.number("seconds"),
        communication_seconds=data.number("communication_seconds"),
        traffic=tuple(
            Traffic(
                r.text("kind"), _texts(r.items("axes")), r.whole("count"), r.whole("bytes"),
                r.number("seconds"),
            )
            for r in rows
        ),
        argument_bytes=data.whole("argument_bytes"),
        peak_bytes=data.whole("peak_bytes"),
        peak=_read_peak(data.inner("peak"), table) if data.has("peak") else None,
    )  # fmt: skip


def _read_peak(data: _Reader, table: list[Sharding]) -> Peak:
    kinds = [_row(r, 2) for r in data.items("bytes_by_kind")]
    return Peak(
        op=data.text("op"),
        module=data.text("module"),
        region=data.text("region"),
        line=data.text("line"),
        step_share=data.number("step_share"),
        items=tuple(_held_item(r, table) for r in data.items("largest")),
        totals=tuple((HeldKind(_typed(kind, str)), _typed(n, int)) for kind, n in kinds),
    )


def _held_item(value: Json, table: list[Sharding]) -> HeldItem:
    name, kind, shape, dtype, number, nbytes, line = _row(value, 7)
    return HeldItem(
        _typed(name, str), HeldKind(_typed(kind, str)), _ints(shape), _typed(dtype, str),
        table[_typed(number, int)], _typed(nbytes, int), _typed(line, str),
    )  # fmt: skip
