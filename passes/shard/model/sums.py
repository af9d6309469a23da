"""Sums over microbatches or a loop's trips, as what comes after reads them: in own groups.

So a sum may stay partial over devices while it grows, and is combined when it is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.graph import Graph, Op, Origin
from autopar.ir.values import Value
from autopar.passes.shard.model.decisions import DecisionKind, Place, Read, ReadKind

if TYPE_CHECKING:
    from autopar.passes.shard.model.read import Reader


class Sums:
    """Values that are summed up, and the ops that read the whole sum.

    If microbatches are not told `apart`, ops that run once find their sums as they are, so that
    they lie no other way than they are read.
    """

    def __init__(self, apart: bool = True) -> None:
        self._apart = apart
        self._looped: set[str] = set()
        self._late: dict[str, Place] = {}
        self._after: dict[str, Place] = {}  # loops
        self._runs_once = True  # whether the op being read does

    def enter(self, reader: Reader, graph: Graph, op: Op) -> None:
        """Begin with an op of the step; one that runs once gets groups for the sums it reads."""
        self._runs_once = op.runs == 1 or not self._apart
        if not self._apart:
            return
        if not self._runs_once:
            self._looped.update(r.name for r in op.results)
            return
        for name in op.value_operands():
            home = reader.standings.get(name)
            if name in self._looped and name not in self._late and isinstance(home, Place):
                value = graph.values[name]
                self._late[name] = _group(reader, value, home, 1, op.origin)

    def leave(self, reader: Reader, value: Value, home: Place, runs: int, origin: Origin) -> None:
        """A loop that runs so often hands on a sum, which lies at home."""
        late = self._after[value.name] = _group(reader, value, home, runs, origin)
        reader.mark_partial(late.decision, value)
        reader.decisions[late.decision].depth = reader.decisions[home.decision].depth

    def late(self, name: str) -> Place | None:
        """The group of a sum, as the op being read finds it."""
        late = self._late.get(name) if self._runs_once else None
        return late or self._after.get(name)


def _group(reader: Reader, value: Value, home: Place, runs: int, origin: Origin) -> Place:
    """A new group that reads a value at home, where the value stays."""
    kind, region, line = DecisionKind.GROUP, origin.region, origin.line
    group = reader.add_group(kind, value, value.name, runs, region, line)
    reader.decisions[group].may_be_partial = value.is_floating
    late = Place(group, tuple(range(len(value.shape))))
    reader.standings[value.name] = home
    reader.reads.append(
        Read(value, home, group, ReadKind.EXACT, 0, None, late.dims, True, runs, region, line,
             reader.count)
    )  # fmt: skip
    return late
