"""Plans as versioned JSON: data only, checked on reading, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autopar.errors import GraphError, GraphSyntaxError, PlanFileError
from autopar.ir.json_reader import Fields, Item, Json, JsonError, parse_json, shown
from autopar.ir.peak import HeldItem, HeldKind, Peak
from autopar.ir.pipeline_json import pipeline_json, read_pipeline
from autopar.ir.plan import FORMAT, Argument, Origin, Plan, Prediction, Traffic
from autopar.ir.recomputation import Recomputation
from autopar.ir.record_json import read_record, record_json
from autopar.ir.sharding_json import (
    ReadTable,
    ShardingTable,
    read_sharding,
    read_table,
    sharding_json,
)
from autopar.ir.text import brief
from autopar.ir.text_file import write_text


def plan_to_json(plan: Plan) -> str:
    """The plan as text: the same plan gives the same bytes."""
    body = _body(plan)
    return json.dumps({"checksum": _checksum(body), **body}, indent=1, ensure_ascii=True) + "\n"


def plan_from_json(text: str, where: str = "the plan") -> Plan:
    """The plan of a text; raises PlanFileError that says what is wrong with it, and where.

    Every index, name, axis and number in it is checked: see `Plan.check`.
    """
    try:
        data = parse_json(text)
    except JsonError as error:
        raise PlanFileError(f"{where} is no JSON: {error}. Plan again, or restore it.") from None
    if not isinstance(data, dict) or "format" not in data:
        raise PlanFileError(f"{where} is JSON but no autopar plan: it has no 'format'.")
    if data["format"] != FORMAT:
        raise PlanFileError(
            f"{where} has plan format {shown(data['format'])}, but this autopar reads {FORMAT}: "
            "plan again, or use the autopar that wrote it."
        )
    body = {k: v for k, v in data.items() if k != "checksum"}
    try:
        agrees = data.get("checksum") == _checksum(body)
    except RecursionError:
        raise PlanFileError(
            f"{where} is no plan: its lists and objects are nested too deeply."
        ) from None
    if not agrees:
        raise PlanFileError(
            f"{where} is damaged: its contents do not match its checksum. Plan again, or "
            "restore it."
        )
    try:
        plan = _plan(Item(body).fields())
        plan.check()
    except (JsonError, GraphError, GraphSyntaxError) as error:
        raise PlanFileError(
            f"{where} is damaged: {brief(error)}. Plan again, or restore it."
        ) from None
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan to a temporary file beside `path`, then put it in place."""
    write_text(plan_to_json(plan), path)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanFileError where there is none or it is damaged."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        # No text, or a path that has a NUL in it.
        why = error.strerror if isinstance(error, OSError) else "it is no text file"
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


def _plan(data: Fields) -> Plan:
    for key in ("format", "checksum"):
        data.get(key)
    table = read_table(data["shardings"])
    sharding = read_sharding(data, table)
    pipeline, record = data.given("pipeline"), data.given("record")
    plan = Plan(
        origin=_origin(data),
        sharding=sharding,
        arguments=tuple(_read_argument(item, table) for item in data["arguments"].items()),
        outputs=tuple(_read_argument(item, table) for item in data["outputs"].items()),
        prediction=_prediction(data["prediction"].fields(), table),
        layer_count=data["layers"].whole(),
        stage_count=data["stages"].whole(),
        microbatches=data["microbatches"].whole(),
        recomputation=_recomputation(data["recomputed"].fields()),
        pipeline=read_pipeline(pipeline.fields(), sharding, table) if pipeline else None,
        record=read_record(record.fields()) if record else None,
    )
    data.end()
    return plan


def _recomputation(data: Fields) -> Recomputation:
    found = Recomputation(
        data["values"].texts(), data["seconds"].number(), data["saved_bytes"].whole()
    )
    data.end()
    return found


def _origin(data: Fields) -> Origin:
    cluster = data["cluster"].fields()
    pins = [item.row(2) for item in data["pins"].items()]
    found = Origin(
        step=data["step"].text(),
        graph_key=data["graph"].text(),
        cluster=cluster["toml"].text(),
        cluster_name=cluster["name"].text(),
        cluster_fingerprint=cluster["fingerprint"].text(),
        jax_minor=data["jax"].text(),
        method=data["method"].text(),
        memory_bytes=data["memory_bytes"].whole(),
        pins=tuple(
            (pattern.text(), tuple(axes.texts() for axes in dims.items())) for pattern, dims in pins
        ),
    )
    cluster.end()
    return found


def _read_argument(item: Item, table: ReadTable) -> Argument:
    path, shape, dtype, role, number, submesh = item.row(6)
    return Argument(
        path.text(), shape.wholes(), dtype.text(), role.text(), table.at(number), submesh.whole()
    )


def _prediction(data: Fields, table: ReadTable) -> Prediction:
    peak = data.given("peak")
    found = Prediction(
        seconds=data["seconds"].number(),
        communication_seconds=data["communication_seconds"].number(),
        exposed_seconds=data["exposed_seconds"].number(),
        traffic=tuple(_traffic(item.fields()) for item in data["traffic"].items()),
        argument_bytes=data["argument_bytes"].whole(),
        peak_bytes=data["peak_bytes"].whole(),
        peak=_read_peak(peak.fields(), table) if peak is not None else None,
    )
    data.end()
    return found


def _traffic(data: Fields) -> Traffic:
    found = Traffic(
        data["kind"].text(), data["axes"].texts(), data["count"].whole(), data["bytes"].whole(),
        data["seconds"].number(),
    )  # fmt: skip
    data.end()
    return found


def _read_peak(data: Fields, table: ReadTable) -> Peak:
    totals = [item.row(2) for item in data["bytes_by_kind"].items()]
    found = Peak(
        op=data["op"].text(),
        module=data["module"].text(),
        region=data["region"].text(),
        line=data["line"].text(),
        step_share=data["step_share"].number(),
        items=tuple(_held_item(item, table) for item in data["largest"].items()),
        totals=tuple((kind.one_of(HeldKind), nbytes.whole()) for kind, nbytes in totals),
    )
    data.end()
    return found


def _held_item(item: Item, table: ReadTable) -> HeldItem:
    name, kind, shape, dtype, number, nbytes, line = item.row(7)
    return HeldItem(
        name.text(), kind.one_of(HeldKind), shape.wholes(), dtype.text(), table.at(number),
        nbytes.whole(), line.text(),
    )  # fmt: skip
