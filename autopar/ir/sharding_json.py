"""A sharding plan as JSON, its distinct shardings in a table of their own."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import MeshError
from autopar.ir.assignment import Assignment
from autopar.ir.json_reader import Fields, Item, Json, JsonError
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


@dataclass(frozen=True)
class ReadTable:
    """The shardings of a file by number."""

    rows: tuple[Sharding, ...]

    def at(self, item: Item) -> Sharding:
        """The sharding whose number an item is."""
        number = item.whole()
        if not 0 <= number < len(self.rows):
            item.fail(f"the number of one of {len(self.rows)} shardings")
        return self.rows[number]


def read_table(item: Item) -> ReadTable:
    """The shardings by number."""
    return ReadTable(tuple(_sharding(row.fields()) for row in item.items()))


def _sharding(data: Fields) -> Sharding:
    found = Sharding(tuple(axes.texts() for axes in data["dims"].items()), data["partial"].texts())
    data.end()
    return found


def sharding_json(plan: ShardingPlan, table: ShardingTable) -> dict[str, Json]:
    """A plan's mesh, outcome and decisions."""
    return {
        "mesh": mesh_json(plan.mesh),
        "outcome": outcome_json(plan.outcome),
        "values": {name: table.number(s) for name, s in plan.values},
        "assignments": [[list(path), list(a.factors)] for path, a in plan.assignments],
        "uses": [[n, region, table.number(s)] for n, region, s in plan.uses],
        "shared_partials": [[list(path), list(held)] for path, held in plan.shared_partials],
        "keeps": plan.reuse_gathered,
    }


def read_sharding(data: Fields, table: ReadTable) -> ShardingPlan:
    """A plan from what `sharding_json` gave; fields of others may stand beside its own."""
    assigned = [row.row(2) for row in data["assignments"].items()]
    uses = [row.row(3) for row in data["uses"].items()]
    shared = [row.row(2) for row in data["shared_partials"].items()]
    return ShardingPlan(
        read_mesh(data["mesh"]),
        tuple((name, table.at(number)) for name, number in data["values"].pairs()),
        tuple((path.wholes(), Assignment(factors.wholes())) for path, factors in assigned),
        tuple((name.text(), region.text(), table.at(number)) for name, region, number in uses),
        tuple((path.wholes(), held.wholes()) for path, held in shared),
        read_outcome(data["outcome"].fields()),
        data["keeps"].flag(),
    )


def mesh_json(mesh: MeshShape) -> Json:
    """A mesh as pairs of axis name and size."""
    return [[n, s] for n, s in zip(mesh.names, mesh.sizes, strict=True)]


def read_mesh(item: Item) -> MeshShape:
    """A mesh from such pairs."""
    pairs = [row.row(2) for row in item.items()]
    names, sizes = [n.text() for n, _ in pairs], [s.whole() for _, s in pairs]
    try:
        return MeshShape(tuple(names), tuple(sizes))
    except MeshError as error:
        raise JsonError(f"{item.place}: {error}") from None


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


def read_outcome(data: Fields) -> Outcome:
    """The same read back."""
    recipes, price = data.get("recipes"), data.get("memory_price_seconds_per_byte")
    found = Outcome(
        data["status"].one_of(Status),
        data["seconds"].number(),
        data["bound_seconds"].number(),
        data["sentence"].text(),
        tuple(_margin(row) for row in recipes.items()) if recipes is not None else (),
        price.number() if price is not None else 0.0,
    )
    data.end()
    return found


def _margin(item: Item) -> Margin:
    name, seconds, note = item.row(3)
    spent = seconds.number() if seconds.value is not None else None
    return Margin(name.text(), spent, note.text())
