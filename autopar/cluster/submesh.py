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
from autopar.cluster.topology import Level, Switch, Topology
from autopar.errors import MeshError


@dataclass(frozen=True)
class Submesh:
    """The shape of a block: its extent along each physical axis, fastest first."""

    name: str
    extents: tuple[int, ...]

    @property
    def device_count(self) -> int:
        """How many devices a block of this shape has."""
        return math.prod(self.extents)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Block:
    """A submesh in its place: the devices start, start + 1, ..."""

    start: int
    submesh: Submesh

    @property
    def stop(self) -> int:
        """The number after the last device's."""
        return self.start + self.submesh.device_count

    @property
    def devices(self) -> tuple[int, ...]:
        """The device numbers, as JAX counts them."""
        return tuple(range(self.start, self.stop))

    def __str__(self) -> str:
        return f"{self.submesh} @ {self.start}"


@dataclass(frozen=True)
class Link:
    """What joins two blocks: seconds to start a transfer, then bytes a second over all wires."""

    start_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: float) -> float:
        """Seconds until `nbytes` have arrived; 0 where there are none."""
        return self.start_seconds + nbytes / self.bytes_per_second if nbytes > 0 else 0.0


def submesh_families(cluster: Cluster) -> tuple[tuple[Submesh, ...], ...]:
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
        tuple(Submesh(_name(cluster.topology, e), e) for e in family) for family in families
    )


def submeshes(cluster: Cluster) -> tuple[Submesh, ...]:
    """Every submesh of every family, fewest devices first."""
    shapes = {shape: None for family in submesh_families(cluster) for shape in family}
    return tuple(sorted(shapes, key=lambda shape: (shape.device_count, shape.extents)))


def place(cluster: Cluster, shapes: Sequence[Submesh]) -> tuple[Block, ...]:
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


def cut_out(cluster: Cluster, submesh: Submesh) -> Cluster:
    """A block of the cluster as a cluster of its own, to lay meshes on and price."""
    topology = cluster.topology
    if isinstance(topology, Switch):
        pairs = list(zip(topology.levels, submesh.extents, strict=True))
        levels = tuple(replace(level, size=size) for level, size in pairs if size > 1)
        levels = levels or (replace(topology.levels[0], size=1),)
        hosted = min(topology.devices_per_host, submesh.device_count)
        part: Topology = replace(topology, levels=levels, devices_per_host=hosted)
    else:
        cores, *shape, slices = submesh.extents
        rings = zip(topology.wraps, shape, topology.shape, strict=True)
        part = replace(
            topology,
            shape=tuple(shape),
            wraps=tuple(wraps and size == whole for wraps, size, whole in rings),
            devices_per_chip=cores,
            network=_sliced(topology.network, slices),
        )
    return replace(cluster, name=f"{submesh} of {cluster.name}", topology=part)


def link_between(cluster: Cluster, left: Block, right: Block) -> Link:
    """The link from one block to another: its slowest part, all parallel wires together.

    On switches every device of the smaller block sends or receives at the rate of one pair. On a
    torus the wires are those through the smaller face, and every hop adds its time.
    """
    topology = cluster.topology
    lengths = topology.lengths
    distances = _distances(lengths, left, right)
    outermost = max((p for p, distance in enumerate(distances) if distance), default=0)
    narrow = min(left.submesh.device_count, right.submesh.device_count)
    if isinstance(topology, Switch):
        return _switched(topology.levels[outermost], narrow)
    if outermost == len(lengths) - 1 and topology.network:
        return _switched(topology.network, narrow)
    wires = min(_face(block.submesh, outermost) for block in (left, right))
    hops = sum(distances[:-1])
    return Link(hops * topology.hop_seconds, wires * topology.link_bytes_per_second)


def links_in_a_row(cluster: Cluster, submesh: Submesh) -> tuple[Link, ...]:
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
    """All of the axes below p and `count` along p."""
    return (*lengths[:p], count, *(1 for _ in lengths[p + 1 :]))


def _runs(length: int) -> tuple[int, ...]:
    """Sizes along the outermost axis: powers of two, divisors, and the whole."""
    return tuple(k for k in range(1, length + 1) if length % k == 0 or k & (k - 1) == 0)


def _chains(length: int) -> list[tuple[int, ...]]:
    """Every way from 1 to `length` by prime steps: 6 -> (1, 2, 6) and (1, 3, 6)."""
    if length == 1:
        return [(1,)]
    primes = [q for q in range(2, length + 1) if length % q == 0 and _is_prime(q)]
    return [(*chain, length) for q in primes for chain in _chains(length // q)]


def _is_prime(number: int) -> bool:
    return all(number % q for q in range(2, math.isqrt(number) + 1))


def _name(topology: Topology, extents: tuple[int, ...]) -> str:
    """Sizes in the order of the cluster's own name: hosts first on switches, x first on a torus."""
    if isinstance(topology, Switch):
        return "x".join(map(str, reversed(extents)))
    cores, *shape, slices = extents
    grid = "x".join(map(str, shape))
    grid = f"{slices}x{grid}" if topology.slices > 1 else grid
    return f"{grid}.{cores}" if topology.devices_per_chip > 1 else grid


def _sliced(network: Level | None, slices: int) -> Level | None:
    return replace(network, size=slices) if network and slices > 1 else None


def _lies(topology: Topology, block: Block) -> bool:
    """Whether the block starts where its shape can lie."""
    lengths = topology.lengths
    partial = max((p for p, extent in enumerate(block.submesh.extents) if extent > 1), default=0)
    unit = math.prod(lengths[:partial])
    place_along = block.start // unit % lengths[partial]
    room = place_along + block.submesh.extents[partial] <= lengths[partial]
    return block.start % unit == 0 and room


def _distances(lengths: tuple[int, ...], left: Block, right: Block) -> list[int]:
    """Steps between the blocks along each axis, 0 where they overlap."""
    distances: list[int] = []
    unit = 1
    for p, length in enumerate(lengths):
        starts = sorted(
            (block.start // unit % length, block.submesh.extents[p]) for block in (left, right)
        )
        (low, extent), (high, _) = starts
        distances.append(max(0, high - (low + extent) + 1))
        unit *= length
    return distances


def _face(submesh: Submesh, axis: int) -> int:
    """Wires out of a block along an axis, one way: one for each device on that side."""
    return submesh.device_count // submesh.extents[axis]


def _switched(level: Level, pairs: int) -> Link:
    rate = level.pair_bytes_per_second or level.bytes_per_second
    return Link(level.start_seconds + level.latency_seconds, pairs * rate)
