"""Collectives that the TPU compiler splits into a part inside each slice and one between them.

Of n devices inside a slice, with V bytes in all (the part inside first, or last of a gather):

    all-reduce       reduce-scatter V, all-reduce V/n between slices, all-gather V;
                     small ones: all-reduce V, all-reduce V between slices
    reduce-scatter   reduce-scatter V, all-reduce or reduce-scatter V/n between slices
    all-gather       all-gather V/n between slices, all-gather V

Which belong together is told by kind, dtype and bytes: between slices the compiler keeps no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.cost.collective import CollectiveKind
from autopar.cost.hlo_collective import HloCollective
from autopar.cost.hlo_groups import axes_of, joined
from autopar.ir.mesh import MeshShape


def join_slices(found: Iterable[HloCollective], mesh: MeshShape) -> tuple[HloCollective, ...]:
    """The collectives of a program with the parts of each split one made one again.

    What runs over axes of the mesh as it is stays so, and so does a part whose like is not found.
    """
    every = [piece for c in found for piece in ((c,) if c.axes else _apart(c))]
    across = [c for c in every if c.between_slices and not c.axes]
    if not across:
        return tuple(every)
    inside = _Inside([c for c in every if not c.between_slices and not c.axes])
    whole: dict[int, HloCollective] = {}
    # An all-gather needs its one part; what is left of those may end an all-reduce.
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        for outer in (c for c in across if c.kind == kind):
            if made := inside.completed(outer, mesh):
                whole[id(outer)] = made
    taken = {id(c) for c in inside.taken}
    return tuple(whole.get(id(c), c) for c in every if id(c) not in taken)


def _apart(collective: HloCollective) -> Iterator[HloCollective]:
    """One collective for each tensor that was combined into one."""
    return (replace(collective, parts=(part,)) for part in collective.parts)


@dataclass
class _Inside:
    """The parts inside slices that no part between them has claimed yet."""

    free: list[HloCollective]

    def __post_init__(self) -> None:
        self.taken: list[HloCollective] = []

    def completed(self, outer: HloCollective, mesh: MeshShape) -> HloCollective | None:
        """The whole collective that one between slices is part of; None if its like is not here."""
        scatter = "reduce-scatter" if outer.kind != "all-gather" else "all-gather"
        first = self._take(outer, scatter, shared=True)
        kind: CollectiveKind = outer.kind
        if first is None and outer.kind == "all-reduce":
            first = self._take(outer, "all-reduce", shared=False)
        elif first and outer.kind == "all-reduce":
            last = self._take(outer, "all-gather", shared=True)
            kind = "all-reduce" if last else "reduce-scatter"
        if first is None:
            return None
        groups = joined((*first.groups, *outer.groups))
        origin = first.origin if first.origin.op_name else outer.origin
        axes = axes_of(groups, mesh)
        return replace(first, kind=kind, groups=groups, origin=origin, axes=axes)

    def _take(self, outer: HloCollective, kind: str, shared: bool) -> HloCollective | None:
        """The free part of a kind of which as many bytes (or each device's share) go between."""
        best, least = None, 0
        for part in self.free:
            share = part.nbytes // (part.group_size if shared else 1)
            excess = outer.nbytes - share
            alike = (part.kind, part.dtype, part.trips) == (kind, outer.dtype, outer.trips)
            if alike and 0 <= excess <= _padding(share) and (best is None or excess < least):
                best, least = part, excess
        if best:
            self.free.remove(best)
            self.taken.append(best)
        return best


def _padding(nbytes: int) -> int:
    """The most that whole tiles add to bytes: 7 rows to one, and to next to nothing 4 KiB."""
    return max(7 * nbytes, 4096)
