"""Shardings: a logical mesh, how a value lies on it, and mesh axes given to the factors of an op.

A mesh is named axes with sizes, and knows nothing about devices. The sharding of a value has mesh
axes for each dim, and axes over which it is a partial sum. An assignment gives axes to the factors
of an op's rule, and that is a sharding of each operand and result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from autopar.errors import GraphError, MeshError
from autopar.ir.rule import Kind, Rule
from autopar.ir.values import Value

# Slowest axis first: the last axis joins the devices that are closest to each other.
DEFAULT_NAMES: tuple[tuple[str, ...], ...] = (
    (),
    ("data",),
    ("data", "model"),
    ("replica", "data", "model"),
)


@dataclass(frozen=True)
class MeshShape:
    """Axis names and sizes, slowest axis first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise MeshError(f"mesh has {len(self.names)} names but {len(self.sizes)} sizes")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axis names {list(self.names)} are not distinct")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not _is_size(size) or not name.isidentifier():
                raise MeshError(f"mesh axis {name!r}={size} needs an identifier and a size >= 1")

    @property
    def device_count(self) -> int:
        """The number of devices that the mesh spans."""
        return math.prod(self.sizes)

    @property
    def splitting(self) -> tuple[str, ...]:
        """The axes of more than one device: no plan names the others, as they split nothing."""
        return tuple(n for n, size in zip(self.names, self.sizes, strict=True) if size > 1)

    def size(self, axes: Sequence[str]) -> int:
        """The product of the sizes of some axes."""
        count = 1
        for a in axes:  # no generator: planning asks for this more often than for anything else
            count *= self.sizes[self.names.index(a)]
        return count

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) or "1"

    @classmethod
    def of(cls, given: MeshShape | str | int | Sequence[int] | Mapping[str, int]) -> MeshShape:
        """A mesh from "2,4", "data=2,model=4", 8, (2, 4), {"data": 2, "model": 4} or itself.

        Raises MeshError where the text or the sizes make no mesh.
        """
        if isinstance(given, MeshShape):
            return given
        if isinstance(given, str):
            return _from_text(given)
        if isinstance(given, Mapping):
            return cls(tuple(map(str, given)), tuple(map(_size, given.values())))
        sizes = (given,) if isinstance(given, int) else tuple(map(_size, given))
        if len(sizes) >= len(DEFAULT_NAMES):
            raise MeshError(
                f"mesh {sizes} has {len(sizes)} axes; unnamed meshes have at most "
                f"{len(DEFAULT_NAMES) - 1}. Name the axes: 'a=2,b=2,c=2,d=2'."
            )
        return cls(DEFAULT_NAMES[len(sizes)], sizes)


def _size(given: object) -> int:
    """A whole number of any type; what is none is left for the mesh to refuse."""
    is_bool = isinstance(given, bool)
    return operator.index(given) if isinstance(given, SupportsIndex) and not is_bool else given  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _from_text(text: str) -> MeshShape:
    parts = [p.strip() for p in text.replace("x", ",").split(",")] if "=" not in text else None
    try:
        if parts is not None:
            return MeshShape.of([int(p) for p in parts])
        pairs = [p.split("=") for p in text.split(",")]
        return MeshShape(tuple(k.strip() for k, _ in pairs), tuple(int(v) for _, v in pairs))
    except ValueError:
        raise MeshError(
            f"mesh {text!r} is not understood; write sizes '2,4' or names 'data=2,model=4'"
        ) from None


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
        count = 1
        for axes in self.dims:
            if axes:
                count *= mesh.size(axes)
        return count

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


@dataclass(frozen=True)
class Assignment:
    """For each mesh axis the factor that it shards, or -1: the op repeats its work there."""

    factors: tuple[int, ...]

    def operand_sharding(self, rule: Rule, index: int, mesh: MeshShape) -> Sharding:
        """The sharding in which an operand is read."""
        return Sharding(self._dims(rule.operands[index], mesh))

    def result_sharding(self, rule: Rule, index: int, mesh: MeshShape) -> Sharding:
        """The sharding of a result: partial over the axes of REDUCE factors."""
        partial = tuple(
            a
            for a, f in zip(mesh.names, self.factors, strict=True)
            if f >= 0 and rule.factors[f].kind is Kind.REDUCE
        )
        return Sharding(self._dims(rule.results[index], mesh), partial)

    def combiner(self, rule: Rule) -> str:
        """The combiner of partial results; choices never mix combiners."""
        kinds = {
            rule.factors[f].combiner
            for f in self.factors
            if f >= 0 and rule.factors[f].kind is Kind.REDUCE
        }
        return min(kinds, default="sum")

    def _dims(
        self, dims: Sequence[tuple[int, ...]], mesh: MeshShape
    ) -> tuple[tuple[str, ...], ...]:
        given = [(a, f) for a, f in zip(mesh.names, self.factors, strict=True) if f >= 0]
        return tuple([tuple([a for a, f in given if f in dim]) for dim in dims])

    def share(self, mesh: MeshShape) -> int:
        """Over how many devices the op's work is divided."""
        return mesh.size([a for a, f in zip(mesh.names, self.factors, strict=True) if f >= 0])

    def text(self, mesh: MeshShape, rule: Rule) -> str:
        """The assignment in words: data->b, model->k(reduce)."""
        names = "abcdefghijklmnopqrstuvwxyz"
        parts = [
            f"{a}->{names[f % 26]}" + ("" if rule.factors[f].kind is Kind.PASS else "(reduce)")
            for a, f in zip(mesh.names, self.factors, strict=True)
            if f >= 0
        ]
        return ", ".join(parts) or "replicated"


def operand_of_result(
    rule: Rule, operand: int, result: Sharding, partial: bool, position: int = 0
) -> Sharding:
    """The sharding of an operand with which an op needs no communication for a result's.

    Follows the factors: axes on a result dim shard its major factor, and with it the operand's
    dim of which that factor is the major one.
    """
    held: dict[int, tuple[str, ...]] = {}
    for axes, dim in zip(result.dims, rule.results[position], strict=True):
        major = next((f for f in dim if rule.factors[f].size > 1), None)
        if axes and major is None:
            raise GraphError(f"a dim that nothing can shard is given axes {'+'.join(axes)}")
        if major is not None and axes:
            held[major] = axes
    dims = tuple(next((held[f] for f in dim if f in held), ()) for dim in rule.operands[operand])
    return Sharding(dims, result.partial if partial else ())
