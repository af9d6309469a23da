"""Where a logical mesh lies on a cluster, and which links a collective over its axes crosses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cluster.cluster import Cluster
from autopar.cluster.factors import Shares, device_numbers, greedy_shares, torus_shares
from autopar.cluster.topology import Level, Switch, Torus
from autopar.errors import MeshError
from autopar.ir.mesh import DEFAULT_NAMES, MeshShape


@dataclass(frozen=True)
class LinkLevel:
    """One physical level that a group of devices spans, as one member of the group sees it.

    `bytes_per_second` is one-way per device over all links it can use at this level, and
    `pair_bytes_per_second` that of one transfer to one neighbor. On a torus a level is one
    direction; `wraps` says it closes into a ring. `reduces_in_switch` is the share of the rate
    that the switch keeps while adding up, None where it cannot; `local_bytes_per_second` is None
    where a device's own share takes no time; see Level for the other figures.
    """

    name: str
    kind: Literal["switch", "torus"]
    size: int
    bytes_per_second: float
    pair_bytes_per_second: float
    shuffle_bytes_per_second: float
    latency_seconds: float
    start_seconds: float
    wraps: bool = False
    full_gather: bool = False
    reduces_in_switch: float | None = None
    reduction_start_seconds: float = 0.0
    local_bytes_per_second: float | None = None


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
            levels.append(_link(cluster.topology, p, size, stride))
    return tuple(levels)


def device_order(cluster: Cluster, mesh: MeshShape) -> tuple[int, ...]:
    """For each mesh position (row-major, slowest axis first) the number of its device.

    Devices are numbered as JAX does: fastest along the cores of a chip, then x, y, z, slice; on
    switches within a host first. Raises MeshError where the mesh does not lie on the cluster.
    """
    return device_numbers(_shares(cluster, mesh), cluster.topology.lengths)


def mesh_shapes(device_count: int, max_axes: int = 2) -> tuple[MeshShape, ...]:
    """Every mesh of up to `max_axes` (at most 3) axes over so many devices, none of size 1.

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
    lengths = cluster.topology.lengths
    if isinstance(cluster.topology, Switch):
        return greedy_shares(mesh.sizes, lengths)
    # A chip's own devices go to the fastest axes and slices to the slowest; the search has
    # the directions in between.
    cores, *shape, slices = lengths
    left = list(mesh.sizes)
    core_shares = [1] * len(left)
    for m in reversed(range(len(left))):
        core_shares[m] = math.gcd(left[m], cores)
        left[m] //= core_shares[m]
        cores //= core_shares[m]
    slice_shares = [1] * len(left)
    for m in range(len(left)):
        slice_shares[m] = math.gcd(left[m], slices)
        left[m] //= slice_shares[m]
        slices //= slice_shares[m]
    middle = torus_shares(left, shape)
    return tuple(
        (core, *row, outer)
        for core, row, outer in zip(core_shares, middle, slice_shares, strict=True)
    )


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


def _link(topology: Switch | Torus, p: int, size: int, stride: int) -> LinkLevel:
    if isinstance(topology, Switch):
        return _level_link(topology.levels[p], size)
    if p == len(topology.shape) + 1:
        assert topology.network is not None
        return _level_link(topology.network, size)
    whole = p == 0 or size == topology.shape[p - 1]
    wraps = whole and (p == 0 or topology.wraps[p - 1])
    # A group that skips `stride` devices shares its wires with the groups in between.
    pair = topology.link_bytes_per_second / stride
    return LinkLevel(
        name="chip" if p == 0 else "xyz"[p - 1] if p <= 3 else f"axis {p}",
        kind="torus",
        size=size,
        bytes_per_second=2 * pair,
        pair_bytes_per_second=pair,
        shuffle_bytes_per_second=pair,
        latency_seconds=topology.hop_seconds * stride,
        start_seconds=0.0,
        wraps=wraps,
        full_gather=topology.full_gather,
    )


def _level_link(level: Level, size: int) -> LinkLevel:
    return LinkLevel(
        name=level.name,
        kind="switch",
        size=size,
        bytes_per_second=level.bytes_per_second,
        pair_bytes_per_second=level.pair_bytes_per_second or level.bytes_per_second,
        shuffle_bytes_per_second=level.shuffle_bytes_per_second or level.bytes_per_second,
        latency_seconds=level.latency_seconds,
        start_seconds=level.start_seconds,
        reduces_in_switch=level.reduction_efficiency or None,
        reduction_start_seconds=level.reduction_start_seconds,
        local_bytes_per_second=level.local_bytes_per_second or None,
    )
