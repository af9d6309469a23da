"""The collectives of a step by kind and axes: how many, their bytes and their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.mesh import MeshShape
from autopar.ir.spmd import COLLECTIVES, SpmdProgram


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same axes in a step, together."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    seconds: float

    def verify(self, meshes: Iterable[MeshShape]) -> None:
        """Raise GraphError unless it is a collective over axes of one of the meshes."""
        known = any(set(self.axes) <= set(mesh.names) for mesh in meshes)
        once = len(set(self.axes)) == len(self.axes)
        if self.kind not in COLLECTIVES or not known or not once:
            raise GraphError(f"there is no {self.kind} over {'+'.join(self.axes)} here")
        if min(self.count, self.nbytes, self.seconds) < 0:
            raise GraphError(f"the figures of {self.kind} cannot be negative")


def traffic_of(
    program: SpmdProgram, seconds: Mapping[tuple[str, tuple[str, ...]], float]
) -> tuple[Traffic, ...]:
    """Collectives by kind and axes, in a fixed order; `seconds` are of all runs of each."""
    table: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for _, c in program.collectives():
        count, nbytes = table.get((c.kind, c.axes), (0, 0))
        table[c.kind, c.axes] = (count + c.runs, nbytes + c.nbytes * c.runs)
    order = {kind: i for i, kind in enumerate(COLLECTIVES)}
    keys = sorted(table, key=lambda k: (order[k[0]], k[1]))
    return tuple(Traffic(*key, *table[key], seconds.get(key, 0.0)) for key in keys)
