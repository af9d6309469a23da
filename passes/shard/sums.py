"""Sums over microbatches, as what runs once a step reads them: in a group of their own.

So a sum may stay partial over devices while it grows, and is combined when it is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.graph import Graph, Op
from autopar.passes.shard.decisions import DecisionKind, Place, Read, ReadKind

if TYPE_CHECKING:
    from autopar.passes.shard.read import Reader


class Sums:
    """What every microbatch makes, and where ops that run once a step find it.

    If not `apart`, they find it as it is, so that it lies no other way than they read it.
    """

    def __init__(self, apart: bool = True) -> None:
        self._apart = apart
        self._looped: set[str] = set()
        self._late: dict[str, Place] = {}
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
                self._late[name] = self._group(reader, graph, op, name, home)

    def late(self, name: str) -> Place | None:
        """The group of a sum, where the op being read runs once."""
        return self._late.get(name) if self._runs_once else None

    def _group(self, reader: Reader, graph: Graph, op: Op, name: str, home: Place) -> Place:
        value, origin = graph.values[name], op.origin
        group = reader.add_group(DecisionKind.GROUP, value, name, 1, origin.region, origin.line)
        reader.decisions[group].may_be_partial = value.is_floating
        late = reader.standings[name]
        reader.standings[name] = home
        dims = tuple(range(len(value.shape)))
        reader.reads.append(
            Read(value, home, group, ReadKind.EXACT, 0, None, dims, True, 1, origin.region,
                 origin.line, reader.count)
        )  # fmt: skip
        assert isinstance(late, Place)
        return late
