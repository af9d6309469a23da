"""Places on a cluster: blocks of neighbouring devices for stages, a logical mesh with its links.

A cluster has physical axes, listed fastest first as JAX numbers devices: the levels of switches, or
a chip's cores, x, y, z and slices. A submesh fills all axes below one and takes a part of that one,
so it is a run of consecutive device numbers. On hosts of M devices this is Alpa's rule: (1, k)
within a host and (k, M) over hosts, with k a power of two or, over hosts, a divisor. A mesh that is
placed knows the links that collectives over each of its axes cross.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster.cluster import Cluster
from autopar.cluster.topology import AbstractTopology, LinkLevel, Shares, outermost
from autopar.cluster.topology import Link as Link
from autopar.errors import ClusterError, MeshError
from autopar.ir.sharding import DEFAULT_NAMES, MeshShape


@dataclass(frozen=True)
class SubmeshShape:
    """The shape of a block: its extent along each physical axis, fastest first."""

    name: str
    extents: tuple[int, ...]

    @property
    def device_count(self) -> int:
        """Number of devices of a block of this shape."""
        return math.prod(self.extents)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Block:
    """A submesh in its place: the devices start, start + 1, ..."""

    start: int
    shape: SubmeshShape

    @property
    def stop(self) -> int:
        """The number after the last device's."""
        return self.start + self.shape.device_count

    @property
    def devices(self) -> tuple[int, ...]:
        """The device numbers, as JAX counts them."""
        return tuple(range(self.start, self.stop))

    def __str__(self) -> str:
        return f"{self.shape} @ {self.start}"


def submesh_families(cluster: Cluster) -> tuple[tuple[SubmeshShape, ...], ...]:
    """Sets of submeshes, smallest first, of which any that add up to all devices tile them.

    Along the outermost axis blocks lie side by side in any sizes; further in, sizes must divide
    one another, so there is one family for each chain of divisors (on powers of two, just one).
    """
    lengths = cluster.topology.lengths
    top = max((p for p, length in enumerate(lengths) if length > 1), default=0)
    families: list[tuple[tuple[int, ...], ...]] = [((1,) * len(lengths),)]
    for p, length in enumerate(lengths[: top + 1]):
        counts = _chains(length)
        if p == top:  # blocks side by side: powers of two, divisors, and the whole
            counts = [tuple(k for k in range(1, length + 1) if length % k == 0 or k & (k - 1) == 0)]
        # A block has all of the axes below p, k along p and 1 along those above.
        above = (1,) * (len(lengths) - p - 1)
        families = [
            (*family, *((*lengths[:p], k, *above) for k in chain if k > 1))
            for family in families
            for chain in counts
        ]
    return tuple(
        tuple(SubmeshShape(cluster.topology.block_name(e), e) for e in family)
        for family in families
    )


def submesh_shapes(cluster: Cluster) -> tuple[SubmeshShape, ...]:
    """The submeshes of all families, fewest devices first."""
    shapes = {shape: None for family in submesh_families(cluster) for shape in family}
    return tuple(sorted(shapes, key=lambda shape: (shape.device_count, shape.extents)))


def place(cluster: Cluster, shapes: Sequence[SubmeshShape]) -> tuple[Block, ...]:
    """A block for each shape, covering all devices: the largest first, equals in their order.

    Raises MeshError where the shapes do not tile the cluster.
    """
    blocks: dict[int, Block] = {}
    start = 0
    for s in sorted(range(len(shapes)), key=lambda s: -shapes[s].device_count):
        blocks[s] = Block(start, shapes[s])
        start = blocks[s].stop
    fits = all(_lies(cluster.topology, block) for block in blocks.values())
    if start != cluster.device_count or not fits:
        raise MeshError(
            f"submeshes {', '.join(map(str, shapes))} do not tile the {cluster.device_count} "
            f"devices of {cluster.name}; take them from one of its families: "
            + "; ".join(", ".join(map(str, family)) for family in submesh_families(cluster))
        )
    return tuple(blocks[s] for s in range(len(shapes)))


def cut_out(cluster: Cluster, submesh: SubmeshShape) -> Cluster:
    """A block of the cluster as a cluster of its own, to lay meshes on and price."""
    part = cluster.topology.block(submesh.extents)
    return replace(cluster, name=f"{submesh} of {cluster.name}", topology=part)


def with_fewer_hosts(cluster: Cluster, count: int) -> Cluster:
    """The rest of a cluster without so many hosts; without so many slices, or racks, of those.

    Raises ClusterError where nothing is left, or a slice would lose a part of its chips.
    """
    topology = cluster.topology
    lengths = topology.lengths
    top = max((p for p, length in enumerate(lengths) if length > 1), default=0)
    if topology.axis_names[top] not in (level.name for level in topology.switch_levels):
        raise ClusterError(
            f"cluster {cluster.name} is one slice, which loses all its chips at once: plan for a "
            "smaller slice by its own name"
        )
    per_host = cluster.device_count // cluster.hosts
    step = max(1, per_host // math.prod(lengths[:top]))
    left = lengths[top] - count * step
    if left < step:
        raise ClusterError(
            f"cluster {cluster.name} without {count} of its hosts (slices, or racks, of those) has "
            "nothing left to plan for: ask for fewer fallbacks"
        )
    extents = (*lengths[:top], left, *lengths[top + 1 :])
    return cut_out(cluster, SubmeshShape(topology.block_name(extents), extents))


def link_between(cluster: Cluster, left: Block, right: Block) -> Link:
    """The link from one block to another: its slowest part, all parallel wires together."""
    distances = _distances(cluster.topology.lengths, left, right)
    axis = outermost(distances)
    pairs = min(left.shape.device_count, right.shape.device_count)
    # Wires out of a block along an axis, one way: one for each device on that side.
    wires = min(b.shape.device_count // b.shape.extents[axis] for b in (left, right))
    return cluster.topology.between(distances, pairs, wires)


def links_in_a_row(cluster: Cluster, submesh: SubmeshShape) -> tuple[Link, ...]:
    """The links between neighbours of one shape that fill the cluster, where places are not known.

    Of a shape that is there but once, the link to what is left; none for the whole cluster.
    """
    size, every = submesh.device_count, cluster.device_count
    starts = range(0, min(every - size, every - 2 * size + 1) + 1, size)
    if size < every < 2 * size:
        starts = range(1)
    return tuple(
        link_between(cluster, Block(start, submesh), Block(start + size, submesh))
        for start in starts
    )


def _chains(length: int) -> list[tuple[int, ...]]:
    """The ways from 1 to `length` by prime steps: 6 -> (1, 2, 6) and (1, 3, 6)."""
    if length == 1:
        return [(1,)]
    divisors = [q for q in range(2, length + 1) if length % q == 0]
    primes = [q for q in divisors if all(q % d for d in divisors if d < q)]
    return [(*chain, length) for q in primes for chain in _chains(length // q)]


def _lies(topology: AbstractTopology, block: Block) -> bool:
    """True if the block starts where its shape can lie."""
    lengths = topology.lengths
    partial = max((p for p, extent in enumerate(block.shape.extents) if extent > 1), default=0)
    unit = math.prod(lengths[:partial])
    place_along = block.start // unit % lengths[partial]
    room = place_along + block.shape.extents[partial] <= lengths[partial]
    return block.start % unit == 0 and room


def _distances(lengths: tuple[int, ...], left: Block, right: Block) -> list[int]:
    """Steps between the blocks along each axis, 0 where they overlap."""
    distances: list[int] = []
    unit = 1
    for p, length in enumerate(lengths):
        starts = sorted(
            (block.start // unit % length, block.shape.extents[p]) for block in (left, right)
        )
        (low, extent), (high, _) = starts
        distances.append(max(0, high - (low + extent) + 1))
        unit *= length
    return distances


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

    On physical axes of 4 and 2, a mesh a=2, b=4 of which a takes (2, 1) of them and b (2, 2):

        4 5 | 6 7       b runs through a block of 2 x 2, a from one block to the next:
        0 1 | 2 3       0 1 4 5, 2 3 6 7
    """
    lengths = cluster.topology.lengths
    # The step between neighbours along each physical axis, beyond what was given out of it so far.
    base = [1] * len(lengths)
    for p in range(1, len(lengths)):
        base[p] = base[p - 1] * lengths[p - 1]
    numbers: tuple[int, ...] = (0,)
    # Fastest mesh axis first: each axis repeats what is inside it at growing offsets.
    for row in reversed(_shares(cluster, mesh)):
        offsets: tuple[int, ...] = (0,)
        for p, share in enumerate(row):
            offsets = tuple(step * base[p] + o for step in range(share) for o in offsets)
            base[p] *= share
        numbers = tuple(o + n for o in offsets for n in numbers)
    return numbers


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


def apart(cluster: Cluster, meshes: Sequence[MeshShape]) -> tuple[MeshShape, ...]:
    """The meshes without those that are one before them with its axes in another order.

    On one switch 2 x 4 and 4 x 2 devices are such: whatever is sharded over the axes of one mesh
    can be over those of the other, and each collective crosses the same links.
    Raises MeshError where one does not lie on the cluster.
    """
    found: list[MeshShape] = []
    for mesh in meshes:
        if not any(_is_reordered(cluster, mesh, other) for other in found):
            found.append(mesh)
    return tuple(found)


def _is_reordered(cluster: Cluster, mesh: MeshShape, other: MeshShape) -> bool:
    if sorted(mesh.sizes) != sorted(other.sizes):
        return False
    rows = range(len(mesh.sizes))
    groups = [g for count in rows for g in itertools.combinations(rows, count + 1)]

    def is_same(order: Sequence[int]) -> bool:
        sizes = tuple(other.sizes[r] for r in order)
        return sizes == mesh.sizes and all(
            axis_links(cluster, mesh, [mesh.names[r] for r in group])
            == axis_links(cluster, other, [other.names[order[r]] for r in group])
            for group in groups
        )

    return any(map(is_same, itertools.permutations(rows)))


def _products(total: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(total,)] if total > 1 else []
    firsts = [size for size in range(2, total + 1) if total % size == 0]
    return [(size, *rest) for size in firsts for rest in _products(total // size, count - 1)]


def _shares(cluster: Cluster, mesh: MeshShape) -> Shares:
    need, have = mesh.device_count, cluster.device_count
    if need == have:
        return cluster.topology.shares(mesh.sizes)
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
