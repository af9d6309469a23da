"""A logical mesh on a cluster: its devices, and the links that collectives over its axes cross."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster.cluster import Cluster
from autopar.cluster.topology import LinkLevel, Shares
from autopar.errors import MeshError
from autopar.ir.mesh import DEFAULT_NAMES, MeshShape


def axis_links(cluster: Cluster, mesh: MeshShape, axes: Sequence[str]) -> tuple[LinkLevel, ...]:
    """The physical levels, innermost first, that a collective over `axes` of the mesh crosses.

    Empty where the axes hold one device. Raises MeshError where the mesh does not lie on the
    cluster or an axis is not the mesh's.
    """
    if unknown := [axis for axis in axes if axis not in mesh.names]:
        raise MeshError(f"mesh {mesh} has no axis {unknown}; its axes are {list(mesh.names)}")
    shares = _shares(cluster, mesh)
    rows = [mesh.names.index(axis) for axis in axes]
    levels: list[LinkLevel] = []
    for p in range(len(cluster.topology.lengths)):
        size = math.prod(shares[m][p] for m in rows)
        if size > 1:
            # Groups that interleave with this one along the physical axis.
            slowest = min(m for m in rows if shares[m][p] > 1)
            others = [m for m in range(slowest + 1, len(shares)) if m not in rows]
            stride = math.prod(shares[m][p] for m in others)
            levels.append(cluster.topology.link_level(p, size, stride))
    return tuple(levels)


def device_order(cluster: Cluster, mesh: MeshShape) -> tuple[int, ...]:
    """For each mesh position (row-major, slowest axis first) the number of its device.

    Devices are numbered as JAX does: fastest along the cores of a chip, then x, y, z, slice; on
    switches within a host first. Raises MeshError where the mesh does not lie on the cluster.
    """
    return _device_numbers(_shares(cluster, mesh), cluster.topology.lengths)


def mesh_shapes(device_count: int, max_axes: int = 2) -> tuple[MeshShape, ...]:
    """The meshes of up to `max_axes` (at most 3) axes over so many devices, none of size 1.

    Fewest axes first, then by sizes; one device gives the mesh without axes.
    Raises MeshError where either number is out of range.
    """
    if device_count < 1 or not 1 <= max_axes < len(DEFAULT_NAMES):
        raise MeshError(
            f"no meshes of up to {max_axes} axes over {device_count} devices; expected at least "
            f"1 device and 1 to {len(DEFAULT_NAMES) - 1} axes"
        )
    if device_count == 1:
        return (MeshShape((), ()),)
    return tuple(
        MeshShape(DEFAULT_NAMES[count], sizes)
        for count in range(1, max_axes + 1)
        for sizes in _products(device_count, count)
    )


def _products(total: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(total,)] if total > 1 else []
    firsts = [size for size in range(2, total + 1) if total % size == 0]
    return [(size, *rest) for size in firsts for rest in _products(total // size, count - 1)]


def _shares(cluster: Cluster, mesh: MeshShape) -> Shares:
    _check_fit(cluster, mesh)
    return cluster.topology.shares(mesh.sizes)


def _check_fit(cluster: Cluster, mesh: MeshShape) -> None:
    need, have = mesh.device_count, cluster.device_count
    if need == have:
        return
    options = ", ".join(f"'{shape}'" for shape in _near(mesh, have)) or f"'data={have}'"
    raise MeshError(
        f"mesh {mesh} needs {need} device{'s' if need > 1 else ''} but {cluster.name} has {have}; "
        f"sizes must multiply to {have}, as in {options}"
    )


def _near(mesh: MeshShape, device_count: int) -> tuple[MeshShape, ...]:
    """Up to three meshes that would do, first those that keep the last axis."""
    count = min(max(len(mesh.sizes), 1), len(DEFAULT_NAMES) - 1)
    shapes = [s for s in mesh_shapes(device_count, count) if len(s.sizes) == count]
    last = mesh.sizes[-1] if mesh.sizes else 1
    shapes.sort(key=lambda s: abs(s.sizes[-1] - last))
    return tuple(
        MeshShape(mesh.names, s.sizes) if len(mesh.names) == count else s for s in shapes[:3]
    )


def _device_numbers(shares: Shares, lengths: Sequence[int]) -> tuple[int, ...]:
    """For each mesh position, slowest axis first, the number of the device that sits there."""
    base = [1] * len(lengths)
    for p in range(1, len(lengths)):
        base[p] = base[p - 1] * lengths[p - 1]
    numbers: tuple[int, ...] = (0,)
    # Fastest mesh axis first: each axis repeats what is inside it at growing offsets.
    for row in reversed(shares):
        offsets: tuple[int, ...] = (0,)
        for p, share in enumerate(row):
            offsets = tuple(step * base[p] + o for step in range(share) for o in offsets)
            base[p] *= share
        numbers = tuple(o + n for o in offsets for n in numbers)
    return numbers
