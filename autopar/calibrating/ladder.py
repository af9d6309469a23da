"""The experiments to run on a cluster, the ones that a fit cannot do without first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from autopar.calibrating.fitted import predicted_seconds
from autopar.cluster import Cluster, LinkLevel, axis_links, mesh_shapes
from autopar.cluster.calibration import Experiment
from autopar.cluster.chip import Platform
from autopar.ir.listing import COLLECTIVES
from autopar.ir.sharding import MeshShape
from autopar.ir.values import item_bytes
from autopar.runtime.measure.bench import Repeats

Axis = tuple[MeshShape, str]

_DTYPES = ("bf16", "f16", "f32", "fp8")  # of matmuls, where the chip has them
_TINY = (2**10, 2**12, 2**14)  # bytes of ops that are all launch
# Bytes of arrays in memory: what a GPU's cache or a TPU's VMEM holds never gets there.
_STREAMS: dict[Platform, tuple[int, int]] = {
    "cpu": (2**20, 2**23),
    "gpu": (2**26, 2**29),
    "tpu": (2**28, 2**30),
}
_SIDES = tuple(2**power for power in range(6, 14))  # of square matmuls
_SKINNY = ((1, 8, 8), (8, 1, 8), (1, 2, 8))  # eighths of the largest square's sides
_MEMORY_SHARE = 16  # an array takes at most this part of a device's memory
_TILE = 128  # items to which a collective's parts are rounded up


@dataclass(frozen=True)
class LadderEffort:
    """Bounds on how much to measure.

    `seconds` bounds the whole, `longest` a single op and `largest`, by platform, the bytes of an
    array of a matmul or a collective; a series has up to `sizes` sizes, and up to
    `axes` axes of meshes are tried beyond those that every level asks for. A program repeats
    its op for about `span` seconds and runs as often as `repeats` says.
    """

    seconds: float
    longest: float
    largest: dict[Platform, int]
    sizes: int
    axes: int
    span: float
    repeats: Repeats


QUICK = LadderEffort(
    seconds=30.0,
    longest=0.01,
    largest={"cpu": 2**22, "gpu": 2**26, "tpu": 2**26},
    sizes=3,
    axes=2,
    span=0.004,
    repeats=Repeats(5, 9, 0.05),
)
FULL = LadderEffort(
    seconds=180.0,
    longest=0.25,
    largest={"cpu": 2**24, "gpu": 2**28, "tpu": 2**27},
    sizes=8,
    axes=6,
    span=0.02,
    repeats=Repeats(5, 25, 0.3),
)


def ladder(cluster: Cluster, effort: LadderEffort) -> tuple[Experiment, ...]:
    """The experiments in the order to run them: of every series the ends first, then between.

    So a measurement that is cut short has something of everything.
    """
    rows = [_ends_first(series) for series in _series(cluster, effort)]
    rounds = zip_longest(*rows)
    return tuple(experiment for row in rounds for experiment in row if experiment is not None)


def _series(cluster: Cluster, effort: LadderEffort) -> list[list[Experiment]]:
    series = [[Experiment("launch", "f32", (n,)) for n in _TINY]]
    sizes = _sizes(*_STREAMS[cluster.chip.platform], effort.sizes)
    series += [[Experiment(kind, "f32", (n,)) for n in sizes] for kind in ("scale", "add")]
    listed = dict(cluster.chip.peak_flops)
    series += [_matmuls(cluster, effort, dtype) for dtype in _DTYPES if dtype in listed]
    room = _room(cluster, effort)
    for mesh, axis in measured_axes(cluster, effort.axes):
        members = mesh.size([axis])
        # Bytes that cut up evenly among the members, each part by them again.
        unit = 4 * _TILE * members
        counts = (max(1, round(n / unit)) for n in _sizes(2**12, room, effort.sizes))
        sizes = [count * unit for count in dict.fromkeys(counts)]
        series += [
            [Experiment(kind, "f32", (n,), str(mesh), axis) for n in sizes] for kind in COLLECTIVES
        ]
    return [[e for e in one if _is_short(cluster, effort, e)] for one in series]


def _room(cluster: Cluster, effort: LadderEffort) -> int:
    return min(effort.largest[cluster.chip.platform], cluster.memory_bytes // _MEMORY_SHARE)


def _sizes(smallest: int, largest: int, count: int) -> list[int]:
    """Up to `count` powers of two, evenly spread from the smallest to the largest."""
    low, high = smallest.bit_length() - 1, max(smallest, largest).bit_length() - 1
    count = min(count, high - low + 1)
    if count < 2:
        return [2**low]
    return [2 ** (low + round(i * (high - low) / (count - 1))) for i in range(count)]


def _matmuls(cluster: Cluster, effort: LadderEffort, dtype: str) -> list[Experiment]:
    """Squares, and in a thorough run also flat shapes of the largest, by their work."""
    item, room = item_bytes(dtype), _room(cluster, effort)
    squares = [Experiment("matmul", dtype, (n, n, n)) for n in _SIDES if item * n * n <= room]
    squares = [e for e in squares if _is_short(cluster, effort, e)]
    if not squares:
        return []
    if effort.sizes < len(squares):
        return [squares[0], squares[len(squares) // 2], squares[-1]]
    eighth = squares[-1].shape[0] // 8
    flat = [tuple(part * eighth for part in shape) for shape in _SKINNY] if eighth else []
    found = squares + [Experiment("matmul", dtype, shape) for shape in flat]
    return sorted(found, key=lambda e: (math.prod(e.shape), e.shape))


def _is_short(cluster: Cluster, effort: LadderEffort, experiment: Experiment) -> bool:
    return predicted_seconds(cluster, experiment) <= effort.longest


def _ends_first(series: Sequence[Experiment]) -> list[Experiment]:
    """First and last, then the middle of the widest gap left, and so on."""
    if len(series) < 3:
        return list(series)
    taken = [0, len(series) - 1]
    while len(taken) < len(series):
        ordered = sorted(taken)
        gaps = pairwise(ordered)
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
        taken.append((low + high) // 2)
    return [series[i] for i in taken]


def measured_axes(cluster: Cluster, most: int) -> tuple[Axis, ...]:
    """Axes of meshes over the whole cluster, one for each different set of links.

    First those that fill one physical level, then that over all devices, then smaller groups
    on one level, then the rest; no more than `most` beyond the first two sorts.
    """
    found: dict[tuple[LinkLevel, ...], Axis] = {}
    if cluster.device_count > 1:
        for mesh in mesh_shapes(cluster.device_count, 2):
            for axis in mesh.names:
                found.setdefault(axis_links(cluster, mesh, (axis,)), (mesh, axis))
    ordered = sorted(found, key=lambda links: _rank(cluster, links))
    needed = sum(_rank(cluster, links) < 2 for links in ordered)
    return tuple(found[links] for links in ordered[: max(needed, most)])


def _rank(cluster: Cluster, links: tuple[LinkLevel, ...]) -> int:
    topology = cluster.topology
    members = dict(zip(topology.axis_names, topology.lengths, strict=True))  # of a physical level
    if len(links) == 1 and links[0].size == members.get(links[0].name):
        return 0
    if math.prod(link.size for link in links) == cluster.device_count:
        return 1
    return 2 if len(links) == 1 else 3
