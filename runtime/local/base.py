"""What a device runs of an op: its piece, given how operands and results lie on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend.traced import Equation
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding


@dataclass(frozen=True)
class Local:
    """How one op lies on the mesh: shardings and whole (global) shapes of what it touches.

    Results are partial over the axes given to the op's REDUCE factors. `platform` is that of the
    devices.
    """

    mesh: MeshShape
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    platform: str

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of this device's piece of a result."""
        return self.results[index].shard_shape(self.result_shapes[index], self.mesh)

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """The shape of this device's piece of an operand."""
        return self.operands[index].shard_shape(self.operand_shapes[index], self.mesh)

    def shard_index(self, axes: Sequence[str]) -> jax.Array:
        """This device's block number along a dim sharded over these axes, major to minor."""
        index = jnp.zeros((), jnp.int32)
        for axis in axes:
            index = index * self.mesh.size((axis,)) + jax.lax.axis_index(axis)
        return index


LocalRun = Callable[[Equation, Sequence[Any], Local], Sequence[Any]]
