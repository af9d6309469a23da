"""A sharding plan as JSON, its distinct shardings in a table of their own."""

from __future__ import annotations

from autopar.ir.assignment import Assignment
from autopar.ir.json_reader import Json, Reader, ints, row_of, texts, typed
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Margin, Outcome, Status
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan


class ShardingTable:
    """Every distinct sharding once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Sharding, int] = {}

    def number(self, sharding: Sharding) -> int:
        """The number of a sharding, a new one where it is new."""
        return self._numbers.setdefault(sharding, len(self._numbers))

    def rows(self) -> Json:
        """The shardings in the order of their numbers."""
        return [
            {"dims": [list(axes) for axes in s.dims], "partial": list(s.partial)}
            for s in self._numbers
        ]


def read_table(rows: list[Json]) -> list[Sharding]:
    """The shardings by number."""
    readers = map(Reader, rows)
    return [
        Sharding(tuple(texts(a) for a in r.items("dims")), texts(r.items("partial")))
        for r in readers
    ]


def sharding_json(plan: ShardingPlan, table: ShardingTable) -> dict[str, Json]:
    """A plan's mesh, outcome and decisions."""
    return {
        "mesh": mesh_json(plan.mesh),
        "outcome": outcome_json(plan.outcome),
        "values": {name: table.number(s) for name, s in plan.values},
        "assignments": [[list(path), list(a.factors)] for path, a in plan.assignments],
        "uses": [[n, region, table.number(s)] for n, region, s in plan.uses],
        "shared_partials": [[list(path), list(held)] for path, held in plan.shared_partials],
        "keeps": plan.keeps,
    }


def read_sharding(data: Reader, table: list[Sharding]) -> ShardingPlan:
    """A plan from what `sharding_json` gave."""
    uses = [row_of(r, 3) for r in data.items("uses")]
    assigned = [row_of(r, 2) for r in data.items("assignments")]
    shared = [row_of(r, 2) for r in data.items("shared_partials")]
    return ShardingPlan(
        read_mesh(data.items("mesh")),
        tuple((name, table[typed(n, int)]) for name, n in data.pairs("values")),
        tuple((ints(path), Assignment(ints(factors))) for path, factors in assigned),
        tuple((typed(n, str), typed(r, str), table[typed(s, int)]) for n, r, s in uses),
        tuple((ints(path), ints(held)) for path, held in shared),
        read_outcome(data.inner("outcome")),
        data.flag("keeps"),
    )


def mesh_json(mesh: MeshShape) -> Json:
    """A mesh as pairs of axis name and size."""
    return [[n, s] for n, s in zip(mesh.names, mesh.sizes, strict=True)]


def read_mesh(rows: list[Json]) -> MeshShape:
    """A mesh from such pairs."""
    pairs = [row_of(r, 2) for r in rows]
    return MeshShape(tuple(typed(n, str) for n, _ in pairs), tuple(typed(s, int) for _, s in pairs))


def outcome_json(outcome: Outcome) -> Json:
    """What a solver said."""
    return {
        "status": outcome.status.value,
        "seconds": outcome.seconds,
        "bound_seconds": outcome.bound_seconds,
        "sentence": outcome.sentence,
        "recipes": [[m.name, m.seconds, m.note] for m in outcome.recipes],
        "memory_price_seconds_per_byte": outcome.memory_price_seconds_per_byte,
    }


def read_outcome(data: Reader) -> Outcome:
    """The same read back."""
    return Outcome(
        Status(data.text("status")),
        data.number("seconds"),
        data.number("bound_seconds"),
        data.text("sentence"),
        tuple(_margin(row) for row in data.items("recipes", missing=())),
        data.number("memory_price_seconds_per_byte", missing=0.0),
    )


def _margin(value: Json) -> Margin:
    name, seconds, note = row_of(value, 3)
    spent = None if seconds is None else float(typed(seconds, float))
    return Margin(typed(name, str), spent, typed(note, str))
