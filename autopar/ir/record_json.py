"""The record of a step as JSON: its graphs line by line, so that two plans can be compared."""

from __future__ import annotations

from autopar.ir.batching import Accumulator, Moment, Rows, When
from autopar.ir.json_reader import Json, Reader, a_list, ints, row_of, texts, typed
from autopar.ir.record import Cutting, Record


def record_json(record: Record) -> Json:
    """A record."""
    return {
        "graph": [*record.graph.splitlines()],
        "rules": [list(pair) for pair in record.rules],
        "cutting": _cutting(record.cutting) if record.cutting is not None else None,
    }


def read_record(data: Reader) -> Record:
    """A record from what `record_json` gave."""
    rules = [texts(pair) for pair in data.items("rules")]
    return Record(
        graph="\n".join(texts(data.items("graph"))),
        rules=tuple((name, text) for name, text in rules),
        cutting=_read_cutting(data.inner("cutting")) if data.has("cutting") else None,
    )


def _cutting(cut: Cutting) -> Json:
    return {
        "microbatches": cut.microbatches,
        "batch": cut.batch,
        "moments": [[m.when.value, *m.loops] for m in cut.moments],
        "rows": [[name, r.dim, r.outer, r.inner] for name, r in cut.rows],
        "accumulators": [[a.value, a.loop, a.combiner, a.dtype] for a in cut.accumulators],
        "loops": cut.loops,
        "barrier": cut.barrier,
        "index": cut.index,
        "hoist": [*cut.hoist.splitlines()],
        "hoisted": list(cut.hoisted),
        "hoist_equations": list(cut.hoist_equations),
    }


def _read_cutting(data: Reader) -> Cutting:
    return Cutting(
        microbatches=data.whole("microbatches"),
        batch=data.whole("batch"),
        moments=tuple(_moment(m) for m in data.items("moments")),
        rows=tuple(_rows(r) for r in data.items("rows")),
        accumulators=tuple(_accumulator(a) for a in data.items("accumulators")),
        loops=data.whole("loops"),
        barrier=data.flag("barrier"),
        index=data.text("index"),
        hoist="\n".join(texts(data.items("hoist"))),
        hoisted=texts(data.items("hoisted")),
        hoist_equations=ints(data.items("hoist_equations")),
    )


def _moment(value: Json) -> Moment:
    when, *loops = a_list(value)
    return Moment(When(typed(when, str)), ints(loops))


def _rows(value: Json) -> tuple[str, Rows]:
    name, dim, outer, inner = row_of(value, 4)
    return typed(name, str), Rows(typed(dim, int), typed(outer, int), typed(inner, int))


def _accumulator(value: Json) -> Accumulator:
    name, loop, combiner, dtype = row_of(value, 4)
    return Accumulator(typed(name, str), typed(loop, int), typed(combiner, str), typed(dtype, str))
