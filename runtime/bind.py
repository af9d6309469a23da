"""Puts logical meshes onto devices, and shardings onto meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import MeshError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding

BoundMesh = Mesh  # a logical mesh with its devices


def bind_mesh(mesh: MeshShape, order: Sequence[int], devices: Sequence[Any] | None = None) -> Mesh:
    """A JAX mesh: position i of the logical mesh is device order[i].

    Raises MeshError where fewer devices are present than the mesh has.
    """
    present = list(jax.devices() if devices is None else devices)
    if len(present) < mesh.device_count:
        raise MeshError(
            f"the plan's mesh ({mesh}) needs {mesh.device_count} devices but {len(present)} "
            f"{present[0].platform if present else ''} device(s) are present. Plan for the devices "
            "that there are, or start JAX with more (jax_num_cpu_devices for virtual ones)."
        )
    grid = np.array([present[i] for i in order], dtype=object).reshape(mesh.sizes)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """A sharding as JAX writes it; partial sums have no such form."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def named_sharding(sharding: Sharding, mesh: Mesh) -> NamedSharding:
    """A sharding on a bound mesh."""
    return NamedSharding(mesh, partition_spec(sharding))
