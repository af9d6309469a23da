"""Plans as versioned JSON: data only, checked on reading, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autopar.errors import PlanFileError
from autopar.ir.json_reader import Json, Reader, a_list, ints, row_of, texts, typed
from autopar.ir.peak import HeldItem, HeldKind, Peak
from autopar.ir.pipeline_json import pipeline_json, read_pipeline
from autopar.ir.plan import FORMAT, Argument, Origin, Plan, Prediction, Traffic
from autopar.ir.recomputation import Recomputation
from autopar.ir.record_json import read_record, record_json
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_json import ShardingTable, read_sharding, read_table, sharding_json
from autopar.ir.text_file import write_text


def plan_to_json(plan: Plan) -> str:
    """The plan as text: the same plan gives the same bytes."""
    body = _body(plan)
    return json.dumps({"checksum": _checksum(body), **body}, indent=1, ensure_ascii=True) + "\n"


def plan_from_json(text: str, where: str = "the plan") -> Plan:
    """The plan of a text; raises PlanFileError that says what is wrong with it."""
    try:
        data: Json = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
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
        return _plan(Reader(body))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanFileError(f"{where} is damaged: {type(error).__name__} {error}") from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan to a temporary file beside `path`, then put it in place."""
    write_text(plan_to_json(plan), path)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanFileError where there is none or it is damaged."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanFileError(f"cannot read plan {str(path)!r}: {why}") from None
    return plan_from_json(text, f"plan {str(path)!r}")


def _checksum(body: dict[str, Json]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _body(plan: Plan) -> dict[str, Json]:
    shardings = ShardingTable()
    o, p = plan.origin, plan.prediction
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
        "prediction": {
            "seconds": p.seconds,
            "communication_seconds": p.communication_seconds,
            "exposed_seconds": p.exposed_seconds,
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
        **sharding_json(plan.sharding, shardings),
        "pipeline": pipeline_json(plan.pipeline, shardings) if plan.pipeline else None,
        "shardings": shardings.rows(),
        "record": record_json(plan.record) if plan.record is not None else None,
    }  # fmt: skip


def _peak(peak: Peak | None, shardings: ShardingTable) -> Json:
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


def _argument(a: Argument, shardings: ShardingTable) -> Json:
    return [a.path, list(a.shape), a.dtype, a.role, shardings.number(a.sharding), a.submesh]


def _plan(data: Reader) -> Plan:
    table = read_table(data.items("shardings"))
    sharding = read_sharding(data, table)
    return Plan(
        origin=_origin(data),
        sharding=sharding,
        arguments=tuple(_read_argument(r, table) for r in data.items("arguments")),
        outputs=tuple(_read_argument(r, table) for r in data.items("outputs")),
        prediction=_prediction(data.inner("prediction"), table),
        layer_count=data.whole("layers"),
        stage_count=data.whole("stages"),
        microbatches=data.whole("microbatches"),
        recomputation=_recomputation(data.inner("recomputed")),
        pipeline=read_pipeline(data.inner("pipeline"), sharding, table)
        if data.has("pipeline")
        else None,
        record=read_record(data.inner("record")) if data.has("record") else None,
    )


def _recomputation(data: Reader) -> Recomputation:
    return Recomputation(
        texts(data.items("values")), data.number("seconds"), data.whole("saved_bytes")
    )


def _origin(data: Reader) -> Origin:
    cluster = data.inner("cluster")
    pins = [row_of(r, 2) for r in data.items("pins")]
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
            (typed(pattern, str), tuple(texts(axes) for axes in a_list(dims)))
            for pattern, dims in pins
        ),
    )


def _read_argument(value: Json, table: list[Sharding]) -> Argument:
    path, shape, dtype, role, number, submesh = row_of(value, 6)
    return Argument(
        typed(path, str), ints(shape), typed(dtype, str), typed(role, str),
        table[typed(number, int)], typed(submesh, int),
    )  # fmt: skip


def _prediction(data: Reader, table: list[Sharding]) -> Prediction:
    rows = [Reader(r) for r in data.items("traffic")]
    return Prediction(
        seconds=data.number("seconds"),
        communication_seconds=data.number("communication_seconds"),
        exposed_seconds=data.number("exposed_seconds"),
        traffic=tuple(
            Traffic(
                r.text("kind"), texts(r.items("axes")), r.whole("count"), r.whole("bytes"),
                r.number("seconds"),
            )
            for r in rows
        ),
        argument_bytes=data.whole("argument_bytes"),
        peak_bytes=data.whole("peak_bytes"),
        peak=_read_peak(data.inner("peak"), table) if data.has("peak") else None,
    )  # fmt: skip


def _read_peak(data: Reader, table: list[Sharding]) -> Peak:
    kinds = [row_of(r, 2) for r in data.items("bytes_by_kind")]
    return Peak(
        op=data.text("op"),
        module=data.text("module"),
        region=data.text("region"),
        line=data.text("line"),
        step_share=data.number("step_share"),
        items=tuple(_held_item(r, table) for r in data.items("largest")),
        totals=tuple((HeldKind(typed(kind, str)), typed(n, int)) for kind, n in kinds),
    )


def _held_item(value: Json, table: list[Sharding]) -> HeldItem:
    name, kind, shape, dtype, number, nbytes, line = row_of(value, 7)
    return HeldItem(
        typed(name, str), HeldKind(typed(kind, str)), ints(shape), typed(dtype, str),
        table[typed(number, int)], typed(nbytes, int), typed(line, str),
    )  # fmt: skip
