"""The sharding of a value on a mesh: axes of each dim, and axes of partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import MeshShape
from autopar.ir.values import Value


@dataclass(frozen=True)
class Sharding:
    """Mesh axes of each dim, major to minor, plus the axes over which shards must be combined.

    With axes (a, b) on one dim, block index = index(a) * size(b) + index(b).
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """True if every device holds the whole and final value."""
        return not self.partial and not any(self.dims)

    def axes(self) -> tuple[str, ...]:
        """The axes in use, dims first."""
        return tuple(a for dim in self.dims for a in dim) + self.partial

    def shard_shape(self, shape: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """The shape of one device's piece."""
        return tuple(n // mesh.size(axes) for n, axes in zip(shape, self.dims, strict=True))

    def pieces(self, mesh: MeshShape) -> int:
        """The number of pieces that a value is cut into."""
        return mesh.size([a for dim in self.dims for a in dim])

    def local_bytes(self, value: Value, mesh: MeshShape) -> int:
        """Bytes of one device's piece of a value."""
        return value.nbytes // self.pieces(mesh)

    def fits(self, shape: Sequence[int], mesh: MeshShape) -> bool:
        """True if every sharded dim divides evenly and each axis is the mesh's and used once."""
        axes = self.axes()
        return (
            len(self.dims) == len(shape)
            and len(set(axes)) == len(axes)
            and all(a in mesh.names for a in axes)
            and all(n % mesh.size(a) == 0 for n, a in zip(shape, self.dims, strict=True))
        )

    def __str__(self) -> str:
        inside = ", ".join("+".join(axes) if axes else "-" for axes in self.dims)
        return f"[{inside}]" + (f" partial({'+'.join(self.partial)})" if self.partial else "")


def replicated(rank: int) -> Sharding:
    """The sharding that leaves every device the whole value."""
    return Sharding(((),) * rank)


def spec_text(sharding: Sharding) -> str:
    """A sharding as its user writes it: P('data', None, ('x', 'y')), trailing Nones left out."""
    entries = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
        for axes in sharding.dims
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"
