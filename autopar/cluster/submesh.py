"""Blocks of neighbouring devices of a cluster, for stages: their shapes, places and links.

A cluster has physical axes, listed fastest first as JAX numbers devices: the levels of switches, or
a chip's cores, x, y, z and slices. A submesh fills all axes below one and takes a part of that one,
so it is a run of consecutive device numbers. On hosts of M devices this is Alpa's rule: (1, k)
within a host and (k, M) over hosts, with k a power of two or, over hosts, a divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster.cluster import Cluster
from autopar.cluster.topology import AbstractTopology, outermost
from autopar.cluster.topology import Link as Link
from autopar.errors import ClusterError, MeshError


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
        counts = [_runs(length)] if p == top else _chains(length)
        families = [
            (*family, *(_extents(lengths, p, k) for k in chain if k > 1))
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
    wires = min(_face(block.shape, axis) for block in (left, right))
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


def _extents(lengths: tuple[int, ...], p: int, count: int) -> tuple[int, ...]:
    """Extents: all of the axes below p and `count` along p."""
    return (*lengths[:p], count, *(1 for _ in lengths[p + 1 :]))


def _runs(length: int) -> tuple[int, ...]:
    """Sizes along the outermost axis: powers of two, divisors, and the whole."""
    return tuple(k for k in range(1, length + 1) if length % k == 0 or k & (k - 1) == 0)


def _chains(length: int) -> list[tuple[int, ...]]:
    """The ways from 1 to `length` by prime steps: 6 -> (1, 2, 6) and (1, 3, 6)."""
    if length == 1:
        return [(1,)]
    primes = [q for q in range(2, length + 1) if length % q == 0 and _is_prime(q)]
    return [(*chain, length) for q in primes for chain in _chains(length // q)]


def _is_prime(number: int) -> bool:
    return all(number % q for q in range(2, math.isqrt(number) + 1))


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


def _face(submesh: SubmeshShape, axis: int) -> int:
    """Wires out of a block along an axis, one way: one for each device on that side."""
    return submesh.device_count // submesh.extents[axis]
