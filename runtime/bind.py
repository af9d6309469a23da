"""Puts logical meshes onto devices, and shardings and arrays onto meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import MeshError
from autopar.frontend.plain_data import dtype_name
from autopar.ir.projection import Host
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import item_bytes

BoundMesh = Mesh  # a logical mesh with its devices


def bind_mesh(mesh: MeshShape, order: Sequence[int], devices: Sequence[Any] | None = None) -> Mesh:
    """A JAX mesh: position i of the logical mesh is device order[i].

    Raises MeshError where fewer devices are present than the mesh has.
    """
    present = list(jax.devices() if devices is None else devices)
    check_present(f"the plan's mesh ({mesh})", mesh.device_count, present)
    grid = np.array([present[i] for i in order], dtype=object).reshape(mesh.sizes)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def check_present(what: str, count: int, devices: Sequence[Any] | None = None) -> None:
    """Raise MeshError where fewer devices are present than something needs."""
    present = jax.devices() if devices is None else devices
    if len(present) < count:
        raise MeshError(
            f"{what} needs {count} devices but {len(present)} "
            f"{present[0].platform if present else ''} device(s) are present. Plan for the devices "
            "that there are, or start JAX with more (jax_num_cpu_devices for virtual ones)."
        )


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """A sharding as JAX writes it; partial sums have no such form."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def lying_spec(sharding: Sharding) -> PartitionSpec:
    """The spec of an array between programs: one with partial axes is a stack over them.

    The stack has a leading dim, sharded over the partial axes, of what is yet to be combined.
    """
    if not sharding.partial:
        return partition_spec(sharding)
    return partition_spec(Sharding((sharding.partial, *sharding.dims)))


def lying_shape(shape: Sequence[int], sharding: Sharding, mesh: MeshShape) -> tuple[int, ...]:
    """The shape of the whole array as it lies: a stack has a leading dim."""
    return (mesh.size(sharding.partial), *shape) if sharding.partial else tuple(shape)


def with_axis(mesh: Mesh) -> Mesh:
    """The mesh, one of a lone device with an axis of size 1: JAX tells it from no mesh by that."""
    if mesh.axis_names:
        return mesh
    shape = shape_with_axis(mesh_shape(mesh))
    return Mesh(mesh.devices.reshape(shape.sizes), shape.names, axis_types=(AxisType.Auto,))


def shape_with_axis(mesh: MeshShape) -> MeshShape:
    """The shape of what `with_axis` gives."""
    return mesh if mesh.names else MeshShape(("one",), (1,))


def is_mesh(given: object) -> bool:
    """True for a mesh of JAX's, with devices or abstract."""
    return isinstance(given, Mesh | AbstractMesh)


def mesh_shape(mesh: Any) -> MeshShape:
    """The logical mesh of one of JAX's, with devices or abstract."""
    return MeshShape(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes))


def positions_of(mesh: Any) -> tuple[int, ...] | None:
    """The numbers of a mesh's devices among those present, in its order; None of an abstract one.

    Raises MeshError where it has devices that are not present.
    """
    if not isinstance(mesh, Mesh):
        return None
    numbers = {device: i for i, device in enumerate(jax.devices())}
    strangers = [d for d in mesh.devices.flat if d not in numbers]
    if strangers:
        raise MeshError(
            f"the mesh has {strangers[0]}, which is not among the {len(numbers)} "
            f"{jax.default_backend()} devices that JAX computes on by default"
        )
    return tuple(numbers[d] for d in mesh.devices.flat)


def named_sharding(sharding: Sharding, mesh: Mesh) -> NamedSharding:
    """A sharding on a bound mesh."""
    return NamedSharding(mesh, partition_spec(sharding))


def processes_of(mesh: Mesh) -> frozenset[int]:
    """The processes whose devices a mesh has."""
    return frozenset(d.process_index for d in mesh.devices.flat)


def host_of(meshes: Sequence[Mesh]) -> Host:
    """This process, among those that have the devices of some meshes."""
    return Host(jax.process_index(), jax.process_count(), tuple(map(processes_of, meshes)))


def without_pieces(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array on devices of other processes: here it has a shape and a place, and no values."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


# -- arrays ------------------------------------------------------------------------------------


def is_key(dtype: Any) -> bool:
    """True of the dtype of typed random keys, which are arrays of words in memory."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def words_of(keys: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the words that keys of some shape and dtype are in memory."""
    kind = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    words: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, kind)
    return words


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

    @property
    def is_key(self) -> bool:
        """True of typed random keys."""
        return is_key(self.dtype)

    def on(self, mesh: Any) -> jax.ShapeDtypeStruct:
        """Its description for JAX; the mesh may be an abstract one."""
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
