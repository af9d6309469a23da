"""The price list of one mesh on one cluster, in seconds: local ops, dispatch, collectives.

A local op is a roofline with a ramp for small work. `kernel_seconds` is the one price of an op, for
the solver's rows, recomputation, profiles and the listing. They differ in which ops they take to be
no kernels of their own: the listing knows its kernels; the others price an op that is fused into
its readers by `fused_seconds`. The listing knows the dims of a GPU's matrix products as well, and
prices these by them. A host takes time to issue a step, too: it has to stay ahead of its
devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import Chip, Cluster, LinkLevel, axis_links
from autopar.cluster.catalog import gpu_target
from autopar.cluster.chip import GpuTarget, Platform
from autopar.cost.collective import SCATTER_TIE, collective_seconds
from autopar.cost.ops import (
    filled_share,
    group_count,
    has_features_for_rows,
    has_filter,
    image_features,
    rows_read,
)
from autopar.errors import MeshError
from autopar.ir.compiler_options import PIPELINED, CompilerOptions
from autopar.ir.graph import Op
from autopar.ir.listing import COLLECTIVES
from autopar.ir.program import Program, Run, Send
from autopar.ir.sharding import MeshShape
from autopar.ir.spmd_program import SpmdProgram
from autopar.rules import HEAVY

# XLA's table for GPUs has matrix products of 256 to 4,096 rows, columns and terms, in up to 4
# batches. What is longer takes as much as so many of the longest, what is shorter such a share of
# the shortest; but of so many batches of products that are shorter all fill a chip at once.
_LEAST_DIM, _LONGEST_DIM, _MOST_BATCHES, _FILLING_BATCHES = 256, 4096, 4, 128
# Fitted to what it has of an H100: 170 bf16 products of the plans that are compared with XLA, 3.7 %
# off on average. The rate without any ramp, in chip efficiencies; the terms of a sum, and items of
# the result for each core, at which half of it is reached; and what any of them takes. The largest
# reach the chip's efficiency.
_PRODUCT_RATE, _RAMP_TERMS, _RAMP_ITEMS, _PRODUCT_SECONDS = 1.2, 195, 3050, 4.8e-6
# Of 386 convolutions of four models in bf16, as cuDNN ran them on an H200, 13 % off on average: the
# rate, in chip efficiencies; the ramp, in those of products; what any of them takes; and how many
# features of an image are read at once, and in the gradient of a filter. First layers, with three,
# leave most of that empty.
_CONVOLUTION_RATE, _CONVOLUTION_RAMPS, _CONVOLUTION_SECONDS = 0.95, 2, 3e-6
_FEATURES_AT_ONCE, _FEATURES_IN_GRADIENT = 64, 32
# Work whose result is fused into what reads it costs next to nothing, but not nothing.
_FUSED_SHARE = 0.05


def kernel_seconds(chip: Chip, op: Op, nbytes: float, share: float = 1.0) -> float:
    """Seconds of the kernel of an op that moves `nbytes` and does 1 / `share` of the op's work.

    Products and convolutions are bound by arithmetic or by memory, all else by memory. XLA for GPUs
    multiplies rows that come in groups by what each group has, with zeros for those of others.
    """
    if op.kind not in HEAVY:
        return elementwise_seconds(chip, nbytes)
    dtype = op.results[0].dtype
    if chip.platform == "gpu" and op.kind == "conv_general_dilated":
        read, of_filter = image_features(op), not has_filter(op)
        if has_features_for_rows(op):
            read, of_filter = max(1, round(rows_read(op) / share)), False
        flops = filled_share(op) * op.flops / share
        return convolution_seconds(chip, flops, nbytes, dtype, read, of_filter)
    flops = op.flops * (group_count(op) if chip.platform == "gpu" else 1)
    return compute_seconds(chip, flops / share, nbytes, dtype)


def fused_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds that an op which makes `nbytes` adds to the kernels that read it."""
    return _FUSED_SHARE * elementwise_seconds(chip, nbytes)


def compute_seconds(chip: Chip, flops: float, nbytes: float, dtype: str) -> float:
    """Seconds of one op that does `flops` in `dtype` and moves `nbytes` to and from memory.

    max(flops / (peak * eff(flops)), nbytes / bandwidth) + launch, with
    eff(f) = emax * f / (f + half), so that the ramp costs half / (emax * peak) at any size.
    Never falls when flops or bytes grow. 0 for no work at all.
    """
    if flops <= 0 and nbytes <= 0:
        return 0.0
    busy = 0.0
    if flops > 0:
        busy = _computing(chip, flops, dtype)
    return max(busy, _streaming(chip, nbytes)) + chip.launch_seconds


def product_seconds(chip: Chip, dims: Sequence[int], nbytes: float, dtype: str) -> float:
    """Seconds of a GPU's matrix product of so many batches, rows, columns and terms of each sum.

    Few items leave cores idle, and short sums leave them waiting for what they load:

        parts * (flops / rate * (1 + ramp / terms) * (1 + cores * ramp / items) + fixed) + launch

    None is faster than the chip's efficiency allows.
    """
    part = list(dims)
    if dims[0] < _FILLING_BATCHES or max(dims[1:]) > _LEAST_DIM:
        longest = (min(max(d, _LEAST_DIM), _LONGEST_DIM) for d in dims[1:])
        part = [min(dims[0], _MOST_BATCHES), *longest]
    parts, terms = math.prod(dims) / math.prod(part), part[-1]
    items = math.prod(part[:-1])
    alone = 2 * items * terms / (chip.compute_efficiency * chip.flops_for(dtype))
    filled = (1 + _RAMP_TERMS / terms) * (1 + gpu_target(chip.name).cores * _RAMP_ITEMS / items)
    busy = parts * max(alone / _PRODUCT_RATE * filled + _PRODUCT_SECONDS, alone)
    return max(busy, _streaming(chip, nbytes)) + chip.launch_seconds


def convolution_seconds(
    chip: Chip, flops: float, nbytes: float, dtype: str, features: int | None, of_filter: bool
) -> float:
    """Seconds of a GPU's convolution of an image of so many features, or of a gradient of one.

    Those of images whose features come in groups, None, leave nothing empty.
    """
    at_once = _FEATURES_IN_GRADIENT if of_filter else _FEATURES_AT_ONCE
    empty = 1.0 if features is None else max(1.0, at_once / max(1, features))
    rate = _CONVOLUTION_RATE * chip.compute_efficiency * chip.flops_for(dtype)
    busy = (empty * flops + _CONVOLUTION_RAMPS * chip.half_flops) / rate
    return max(busy, _streaming(chip, nbytes)) + _CONVOLUTION_SECONDS + chip.launch_seconds


def elementwise_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds of one fused element-wise pass that moves `nbytes` to and from memory."""
    return _streaming(chip, nbytes) + chip.launch_seconds if nbytes > 0 else 0.0


def _computing(chip: Chip, flops: float, dtype: str) -> float:
    return (flops + chip.half_flops) / (chip.compute_efficiency * chip.flops_for(dtype))


def _streaming(chip: Chip, nbytes: float) -> float:
    return max(nbytes, 0.0) / (chip.memory_efficiency * chip.memory_bytes_per_second)


def _on_links(kind: str, nbytes: float, links: Sequence[LinkLevel]) -> float:
    seconds = collective_seconds(kind, nbytes, links)
    if kind != "reduce-scatter":
        return seconds
    # It may always be done as an all-reduce that is then sliced; XLA turns that pair back into a
    # reduce-scatter, so of equals the plan takes the reduce-scatter.
    return min(seconds, SCATTER_TIE * collective_seconds("all-reduce", nbytes, links))


# Measured with benchmarks/bench_lowerings.py; what arrays cost is the same on every backend.
INSTRUCTION_SECONDS = 50e-6
_PROGRAM_SECONDS = 300e-6
_PIECE_SECONDS = 8e-6  # an array of a submesh that goes into one program, or comes out of it


def issue_seconds(lowered: Program | SpmdProgram, blocks: Sequence[int], cluster: Cluster) -> float:
    """Seconds that the busiest host takes; `blocks` are the first devices of the submeshes."""
    of_host = max(1, cluster.device_count // cluster.hosts)
    hosts = [first // of_host for first in blocks]
    issued: Counter[int] = Counter()
    if isinstance(lowered, SpmdProgram):
        for held in (*lowered.feeds, *lowered.fetches):
            issued.update(h for h, r in zip(hosts, held.registers, strict=True) if r >= 0)
        return _PROGRAM_SECONDS + _PIECE_SECONDS * max(issued.values(), default=0)
    for step in lowered.instructions:
        if isinstance(step, Run):
            issued[hosts[lowered.submesh_of(step)]] += 1
        elif isinstance(step, Send):
            issued.update({hosts[step.source], hosts[step.target]})
    return INSTRUCTION_SECONDS * max(issued.values(), default=0)


# What each platform's compiler runs beside work: XLA makes every collective of a GPU asynchronous,
# on TPUs only these, and none on CPUs.
_BESIDE: Mapping[str, frozenset[str]] = {
    "gpu": frozenset(COLLECTIVES),
    "tpu": frozenset({"all-gather", "collective-permute"}),
    "cpu": frozenset(),
}
# The first and the last collectives of a step have no work to run beside, and what runs beside work
# slows it a little.
_EXPOSED_SHARE = 0.25


# XLA's model of GPUs has a block load so many bytes in a cycle.
_BLOCK_CYCLE_BYTES = 32


@dataclass(frozen=True)
class _Links:
    """The levels that some axes cross, as one collective sees them and as one that joins others."""

    alone: tuple[LinkLevel, ...]
    joined: tuple[LinkLevel, ...]


@dataclass(frozen=True)
class Prices:
    """Prices, in seconds, of communication over each set of axes and of work on each device."""

    cluster: Cluster
    mesh: MeshShape
    # Options of the compiler that are asked for, put over those that are chosen.
    options: CompilerOptions = ()
    # Every subset of the axes is laid out once: planners ask for millions of prices.
    _links: dict[frozenset[str], _Links] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        links: dict[frozenset[str], _Links] = {}
        for mask in range(1 << len(self.mesh.names)):
            axes = tuple(a for i, a in enumerate(self.mesh.names) if mask >> i & 1)
            levels = axis_links(self.cluster, self.mesh, axes)
            links[frozenset(axes)] = _Links(levels, tuple(level.joined for level in levels))
        object.__setattr__(self, "_links", links)

    def _known(self, axes: Sequence[str]) -> _Links:
        try:
            return self._links[frozenset(axes)]
        except KeyError:
            raise MeshError(
                f"mesh {self.mesh} has no axes {list(axes)}; its axes are {list(self.mesh.names)}"
            ) from None

    def collective(self, kind: str, nbytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over `axes` on a whole local buffer of `nbytes`.

        The buffer is the result of an all-gather, and the local operand of an all-reduce,
        reduce-scatter, all-to-all or collective-permute. 0 where the axes hold one device.
        Raises ClusterError on an unknown kind and MeshError on an unknown axis.
        """
        return _on_links(kind, nbytes, self._known(axes).alone)

    def joined(self, kind: str, nbytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective that another has started already, as one with which it runs.

        So moves are priced before it is known what runs together. Compilers combine no all-to-alls.
        Raises as `collective`.
        """
        links = self._known(axes)
        return _on_links(kind, nbytes, links.alone if kind == "all-to-all" else links.joined)

    @property
    def platform(self) -> Platform:
        """The platform of the cluster's devices."""
        return self.cluster.chip.platform

    @property
    def beside(self) -> frozenset[str]:
        """The kinds of collectives that run beside work which does not wait for them."""
        return _BESIDE[self.platform]

    @property
    def pipelined(self) -> frozenset[str]:
        """The kinds of collectives that the compiler runs beside another trip of their loop."""
        if self.platform != "gpu":
            return frozenset()
        asked = dict(self.options)
        return frozenset(kind for kind, name in PIPELINED.items() if asked.get(name, True))

    def exposed_share(self, kind: str) -> float:
        """The share of a collective off the critical path that a step is expected to wait for."""
        return _EXPOSED_SHARE if kind in self.beside else 1.0

    def kernel(self, op: Op, nbytes: float, share: float) -> float:
        """Seconds of an op's kernel that moves `nbytes` and does 1 / `share` of its work."""
        return kernel_seconds(self.cluster.chip, op, nbytes, share)

    def product(self, op: Op, nbytes: float, dims: Sequence[int]) -> float:
        """Seconds of a matrix product of a GPU, of so many batches, rows, columns and terms."""
        return product_seconds(self.cluster.chip, dims, nbytes, op.results[0].dtype)

    def elementwise(self, nbytes: float) -> float:
        """Seconds of one fused element-wise pass over `nbytes` of one device's memory."""
        return elementwise_seconds(self.cluster.chip, nbytes)

    @property
    def gpu(self) -> GpuTarget:
        """The figures that XLA's model of the chip starts from."""
        return gpu_target(self.cluster.chip.name)

    @property
    def filling_blocks(self) -> float:
        """The number of a GPU's blocks that fill its memory's bandwidth."""
        return self.gpu.memory_bytes_per_second / (self.gpu.clock_ghz * 1e9 * _BLOCK_CYCLE_BYTES)

    def in_blocks(self, loaded: float, blocks: int, stored: float) -> float:
        """Seconds of a kernel that few blocks of a GPU run; what they load may be in a cache."""
        rate = blocks * self.gpu.clock_ghz * 1e9 * _BLOCK_CYCLE_BYTES
        return loaded / rate + self.elementwise(stored)
