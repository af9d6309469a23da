"""What registers hold: arrays by their shape, dtype and layout, the same on every submesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.plain_data import dtype_name
from autopar.frontend.traced import Const, FlatProgram
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding
from autopar.ir.values import item_bytes
from autopar.runtime.bind import lying_shape, lying_spec


@dataclass(frozen=True)
class ArrayType:
    """An array as it lies on some mesh: whole shape, dtype, and axes of each dim."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec

    @classmethod
    def lying(
        cls, shape: tuple[int, ...], dtype: Any, sharding: Sharding, mesh: MeshShape
    ) -> ArrayType:
        """The type of a value that lies so; one with partial axes is a stack."""
        return cls(lying_shape(shape, sharding, mesh), dtype, lying_spec(sharding))

    def on(self, mesh: Any) -> jax.ShapeDtypeStruct:
        """What JAX is told of it; the mesh may be an abstract one."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, self.spec))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding on a bound mesh."""
        return NamedSharding(mesh, self.spec)

    def local_bytes(self, mesh: MeshShape) -> int:
        """Bytes of one device's piece on a mesh."""
        dims = (d if isinstance(d, tuple) else () if d is None else (d,) for d in self.spec)
        return (
            math.prod(self.shape)
            * item_bytes(dtype_name(self.dtype))
            // math.prod(mesh.size(axes) for axes in dims)
        )

    def stacked(self, count: int) -> ArrayType:
        """The type of `count` such arrays as one, along a new first dim that is not sharded."""
        return ArrayType((count, *self.shape), self.dtype, PartitionSpec(None, *self.spec))

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{dtype_name(self.dtype)}[{dims}] {tuple(self.spec)}"


def output_avals(program: FlatProgram) -> Iterator[Any]:
    """The abstract value of each output."""
    avals = dict(program.avals())
    for output in program.outputs:
        yield output.aval if isinstance(output, Const) else avals[output]
