"""The record of a step as JSON: its graphs line by line, so that two plans can be compared."""

from __future__ import annotations

from autopar.ir.batching import Accumulator, Moment, Rows, When
from autopar.ir.json_reader import Fields, Item, Json
from autopar.ir.record import Cutting, Record


def record_json(record: Record) -> Json:
    """A record."""
    return {
        "graph": [*record.graph.split("\n")],
        "rules": [list(pair) for pair in record.rules],
        "cutting": _cutting(record.cutting) if record.cutting is not None else None,
    }


def read_record(data: Fields) -> Record:
    """A record from what `record_json` gave."""
    rules = [pair.row(2) for pair in data["rules"].items()]
    cutting = data.given("cutting")
    found = Record(
        graph="\n".join(data["graph"].texts()),
        rules=tuple((name.text(), text.text()) for name, text in rules),
        cutting=_read_cutting(cutting.fields()) if cutting is not None else None,
    )
    data.end()
    return found


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
        "hoist": [*(cut.hoist.split("\n") if cut.hoist else ())],
        "hoisted": list(cut.hoisted),
        "hoist_equations": list(cut.hoist_equations),
    }


def _read_cutting(data: Fields) -> Cutting:
    found = Cutting(
        microbatches=data["microbatches"].whole(),
        batch=data["batch"].whole(),
        moments=tuple(_moment(item) for item in data["moments"].items()),
        rows=tuple(_rows(item) for item in data["rows"].items()),
        accumulators=tuple(_accumulator(item) for item in data["accumulators"].items()),
        loops=data["loops"].whole(),
        barrier=data["barrier"].flag(),
        index=data["index"].text(),
        hoist="\n".join(data["hoist"].texts()),
        hoisted=data["hoisted"].texts(),
        hoist_equations=data["hoist_equations"].wholes(),
    )
    data.end()
    return found


def _moment(item: Item) -> Moment:
    when, *loops = item.items() or [item]
    return Moment(when.one_of(When), tuple(loop.whole() for loop in loops))


def _rows(item: Item) -> tuple[str, Rows]:
    name, dim, outer, inner = item.row(4)
    return name.text(), Rows(dim.whole(), outer.whole(), inner.whole())


def _accumulator(item: Item) -> Accumulator:
    name, loop, combiner, dtype = item.row(4)
    return Accumulator(name.text(), loop.whole(), combiner.text(), dtype.text())
