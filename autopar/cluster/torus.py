"""A grid of chips whose neighbours are linked: TPU slices, and the network between them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from autopar.cluster.topology import (
    AbstractFabric,
    AbstractTopology,
    CompilerTopology,
    DirectLink,
    Layout,
    Link,
    LinkLevel,
    Shares,
    SwitchLevel,
    outermost,
)
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts

_HOST_BOUNDS = (2, 2, 1)
_COMPILER_AXES = 3  # what TPU topologies are described by, also where chips lie in a plane


@dataclass(frozen=True)
class Torus(AbstractTopology):
    """A grid of chips whose neighbors are linked, in one slice or several joined by a network.

    `shape` is x, y(, z) in chips, as in "v5p:4x4x8". `wraps` says which axes close into rings.
    `link_bytes_per_second` is one way over one link. `host_bounds` are the chips of one host.
    With `devices_per_chip` 2, each chip counts as two devices, priced as one more axis of links
    (as libtpu does). `full_gather`: all-gathers take the whole buffer's time, not (n-1)/n of it.
    `network` joins several slices; its size is the number of slices.
    """

    kind: ClassVar[str] = "torus"

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    link_bytes_per_second: float
    hop_seconds: float
    host_bounds: tuple[int, ...]
    devices_per_chip: int = 1
    full_gather: bool = False
    network: SwitchLevel | None = None

    def __post_init__(self) -> None:
        if not self.shape or not len(self.shape) == len(self.wraps) == len(self.host_bounds):
            raise ClusterError(
                f"torus shape {self.shape}, wraps {self.wraps} and host_bounds "
                f"{self.host_bounds} must have one entry for each axis"
            )
        least = min(*self.shape, *self.host_bounds, self.devices_per_chip)
        if least < 1 or not self.link_bytes_per_second > 0 or self.hop_seconds < 0:
            raise ClusterError(
                f"torus shape {self.shape} with links of {self.link_bytes_per_second} bytes/s "
                "needs sizes >= 1, a rate > 0 and hops of 0 seconds or more"
            )

    @property
    def slices(self) -> int:
        """Number of grids."""
        return self.network.size if self.network else 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The physical axes, fastest first: the chip's devices, x, y, z, slices."""
        return (self.devices_per_chip, *self.shape, self.slices)

    @property
    def hosts(self) -> int:
        """Number of hosts that drive the chips, over all slices."""
        bounds = zip(self.shape, self.host_bounds, strict=True)
        return self.slices * math.prod(math.ceil(size / bound) for size, bound in bounds)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """chip, x, y, z and the network that joins slices."""
        grid = ("xyz"[p] if p < 3 else f"axis {p + 1}" for p in range(len(self.shape)))
        return ("chip", *grid, self.network.name if self.network else "slices")

    @property
    def switch_levels(self) -> tuple[SwitchLevel, ...]:
        """The network that joins slices, if there are several."""
        return (self.network,) if self.network else ()

    @property
    def direct_link(self) -> DirectLink | None:
        """A link between neighbours."""
        return DirectLink(self.link_bytes_per_second, self.hop_seconds)

    @property
    def own_figures(self) -> Mapping[str, float]:
        """Those of the links."""
        return {
            "link_bytes_per_second": self.link_bytes_per_second,
            "hop_seconds": self.hop_seconds,
        }

    def with_figures(self, figures: Mapping[str, float], levels: Sequence[SwitchLevel]) -> Torus:
        """The same grid with other links and another network."""
        own: dict[str, Any] = dict(figures)
        return replace(self, **own, network=levels[0] if levels else None)

    def shares(self, sizes: Sequence[int]) -> Shares:
        """A chip's own devices go to the fastest axes and slices to the slowest.

        The search has the directions in between.
        """
        cores, *shape, slices = self.lengths
        left = list(sizes)
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

    def link_level(self, axis: int, size: int, stride: int) -> LinkLevel:
        """A direction, whose wires a group shares with those that it skips; or the network."""
        if axis == len(self.shape) + 1:
            assert self.network is not None
            return self.network.link(size)
        whole = axis == 0 or size == self.shape[axis - 1]
        pair = self.link_bytes_per_second / stride
        return LinkLevel(
            name=self.axis_names[axis],
            kind="torus",
            size=size,
            bytes_per_second=2 * pair,
            pair_bytes_per_second=pair,
            shuffle_bytes_per_second=pair,
            latency_seconds=self.hop_seconds * stride,
            start_seconds=0.0,
            wraps=whole and (axis == 0 or self.wraps[axis - 1]),
            full_gather=self.full_gather,
        )

    def block(self, extents: Sequence[int]) -> Torus:
        """A smaller grid: a ring only where it has the whole of one."""
        cores, *shape, slices = extents
        rings = zip(self.wraps, shape, self.shape, strict=True)
        return replace(
            self,
            shape=tuple(shape),
            wraps=tuple(wraps and size == whole for wraps, size, whole in rings),
            devices_per_chip=cores,
            network=replace(self.network, size=slices) if self.network and slices > 1 else None,
        )

    def block_name(self, extents: Sequence[int]) -> str:
        """Slices, x, y and z, then the devices of a chip where it has several."""
        cores, *shape, slices = extents
        grid = "x".join(map(str, shape))
        grid = f"{slices}x{grid}" if self.slices > 1 else grid
        return f"{grid}.{cores}" if self.devices_per_chip > 1 else grid

    def between(self, distances: Sequence[int], pairs: int, wires: int) -> Link:
        """The wires are those through the smaller face, and every hop adds its time."""
        if outermost(distances) == len(self.lengths) - 1 and self.network:
            return self.network.transfer(pairs)
        return Link(sum(distances[:-1]) * self.hop_seconds, wires * self.link_bytes_per_second)

    def layout(self) -> Layout:
        """A block for each plane of x and y; z is to the right, slices lie under one another."""
        x, y, *deep = (*self.shape, 1)[: max(2, len(self.shape))]
        bounds = (*self.host_bounds, 1)
        wraps = (*self.wraps, False)
        planes = math.prod(deep)
        numbered = [(f"slice {s}", f"z={z}") for s in range(self.slices) for z in range(planes)]
        several = (self.slices > 1, planes > 1)
        names = [" ".join(itertools.compress(words, several)) for words in numbered]
        return Layout(
            columns=x * self.devices_per_chip,
            rows=y,
            blocks=planes * self.slices,
            names=tuple(names),
            host=(bounds[0] * self.devices_per_chip, bounds[1]),
            wraps=(wraps[0], wraps[1]),
            linked=True,
            abreast=planes if planes > 1 else self.slices,
        )

    def compiler_topology(self, chip: str, cluster: str) -> CompilerTopology:
        """ "kind:AxB[xC]" of one slice, with the chips of a host and the rings along x, y, z."""
        del cluster
        sizes = "x".join(map(str, self.shape))
        flat = _COMPILER_AXES - len(self.shape)
        # A host that is wider than what was cut out, or does not divide it, has fewer chips there.
        bounds = [math.gcd(b, s) for b, s in zip(self.host_bounds, self.shape, strict=True)]
        return CompilerTopology(
            f"{chip}:{sizes}",
            self.slices,
            (*bounds, *(1,) * flat),
            (*self.wraps, *(False,) * flat),
            self.devices_per_chip,
        )

    def __str__(self) -> str:
        axes = zip(self.shape, self.wraps, strict=True)
        text = " x ".join(f"{size}{' (ring)' if wraps else ''}" for size, wraps in axes)
        text = f"torus {text}"
        if self.devices_per_chip > 1:
            text += f", {self.devices_per_chip} devices a chip"
        return f"{self.slices} slices of {text}" if self.slices > 1 else text


def torus_shares(sizes: Sequence[int], lengths: Sequence[int]) -> Shares:
    """Shares that split the fewest physical axes, then the fewest for the fastest mesh axes.

    Exhaustive over the ways to factor each mesh axis; ties go to the first in a fixed order
    (the fastest mesh axis takes most of the fastest physical axis).
    """
    best: Shares | None = None
    best_score: tuple[int, ...] = ()
    for shares in _every_share(tuple(reversed(sizes)), tuple(lengths)):
        # Pieces of split axes over all mesh axes, then for each mesh axis, fastest first.
        pieces = [
            sum(1 for share, length in zip(row, lengths, strict=True) if 1 < share < length)
            for row in shares
        ]
        score = (sum(pieces), *pieces)
        if best is None or score < best_score:
            best, best_score = shares, score
    return tuple(reversed(best or ()))


def _every_share(sizes: tuple[int, ...], left: tuple[int, ...]) -> Iterator[Shares]:
    if not sizes:
        yield ()
        return
    for row in _rows(sizes[0], left):
        rest = tuple(length // share for length, share in zip(left, row, strict=True))
        for others in _every_share(sizes[1:], rest):
            yield (row, *others)


def _rows(size: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The ways to write `size` as a product of divisors of `left`, biggest first."""
    if not left:
        if size == 1:
            yield ()
        return
    common = math.gcd(size, left[0])
    for share in range(common, 0, -1):
        if common % share == 0:
            for others in _rows(size // share, left[1:]):
                yield (share, *others)


@dataclass(frozen=True)
class TorusFabric(AbstractFabric):
    """Chips in a grid; `ring_multiple` is the axis size, or its divisor, that closes a ring.

    `largest` is the biggest slice in chips. A chip counts for `cores` in Google's names of slices:
    2 where they count cores, as v5p-64 does, 1 where they count chips.
    """

    form: ClassVar[re.Pattern[str]] = re.compile(r"(?:(\d+)x)?(?P<chip>[a-z]\w*):(\d+(?:x\d+)*)")

    dims: int
    largest: int
    cores: int
    ring_multiple: int
    link_bytes_per_second: float
    devices_per_chip: int
    full_gather: bool
    network: SwitchLevel

    def read(self, text: str, chip: str, match: re.Match[str]) -> tuple[str, Torus]:
        """A cluster from "v5p:4x4x8" or "2xv5e:16x16": the shape of a slice, and their number."""
        slices, _, sizes = match.groups()
        shape = tuple(int(size) for size in sizes.split("x"))
        count = int(slices or 1)
        full = f"{chip}:{sizes}" if count == 1 else f"{count}x{chip}:{sizes}"
        return full, self._build(text, shape, count)

    def hint(self, chip: str) -> str:
        """The form of its names."""
        example = "x".join(["4"] * self.dims)
        return f"{chip} is wired as a torus; write its shape, as in '{chip}:{example}'"

    @classmethod
    def larger(cls, match: re.Match[str], factor: int) -> str:
        """The shortest side is doubled, the last of equal ones, by a power of two."""
        slices, chip, sizes = match.groups()
        shape = [int(size) for size in sizes.split("x")]
        for _ in range(factor.bit_length() - 1):
            at = max(i for i, size in enumerate(shape) if size == min(shape))
            shape[at] *= 2
        return f"{slices + 'x' if slices else ''}{chip}:{'x'.join(map(str, shape))}"

    def local_name(self, chip: str, facts: Sequence[DeviceFacts]) -> str:
        """The shape that the devices' coordinates span."""
        if any(not f.coords for f in facts):
            raise ClusterError(
                f"{chip} devices report no coordinates; name the cluster by its shape"
            )
        spans = [max(axis) - min(axis) + 1 for axis in zip(*(f.coords for f in facts), strict=True)]
        shape = "x".join(map(str, spans[: self.dims]))
        slices = len({f.slice_index for f in facts})
        return f"{slices}x{chip}:{shape}" if slices > 1 else f"{chip}:{shape}"

    def by_count(self, text: str, chip: str, slices: str | None, count: str) -> str | None:
        """A name as Google gives to TPU slices, such as v5p-64, with their shape: v5p:2x4x4."""
        cores = self.cores
        shapes = {math.prod(s): s for s in self._slice_shapes()}
        chips, rest = divmod(int(count), cores)
        if rest or chips not in shapes:
            counts = sorted(n * cores for n in shapes)
            near = sorted(sorted(counts, key=lambda n: abs(n - int(count)))[:3])
            unit = "cores, two to a chip" if cores > 1 else "chips"
            raise ClusterError(
                f"cluster {text!r}: there is no {chip} slice of {count} {unit}; near it are "
                f"{', '.join(f'{chip}-{n}' for n in near)}"
            )
        sizes = "x".join(map(str, shapes[chips]))
        return f"{slices}x{chip}:{sizes}" if slices is not None else f"{chip}:{sizes}"

    def _build(self, text: str, shape: tuple[int, ...], slices: int) -> Torus:
        if fault := self._fault(shape, slices):
            raise ClusterError(f"cluster {text!r} cannot be built: {fault}")
        bounds = tuple(min(b, s) for b, s in zip(_HOST_BOUNDS, shape, strict=False))
        return Torus(
            shape=shape,
            # A ring needs optical or edge links, which slices have only at these sizes.
            wraps=tuple(size % self.ring_multiple == 0 for size in shape),
            link_bytes_per_second=self.link_bytes_per_second,
            hop_seconds=1e-6,
            host_bounds=bounds,
            devices_per_chip=self.devices_per_chip,
            full_gather=self.full_gather,
            network=replace(self.network, size=slices) if slices > 1 else None,
        )

    def _fault(self, shape: tuple[int, ...], slices: int) -> str | None:
        """The reason why no slice has this shape, with what would do, or None."""
        if slices < 1 or min(shape) < 1:
            return "every count must be 1 or more"
        if len(shape) != self.dims:
            example = "x".join(["4"] * self.dims)
            return f"it has {len(shape)} sizes but slices are {self.dims}-D, as in {example}"
        if math.prod(shape) > self.largest:
            return f"it has {math.prod(shape)} chips but the largest slice has {self.largest}"
        if set(shape) == {1}:
            return None
        if self.dims == 2:
            if any(size not in (2, 4, 8, 16) for size in shape):
                return "each size must be 2, 4, 8 or 16 (or 1x1)"
        elif any(s % 4 and s not in (1, 2) for s in shape) or any(s % 2 for s in shape[:2]):
            return "each size must be 2 or a multiple of 4, or 1 on the last axis (or 1x1x1)"
        return None

    def _slice_shapes(self) -> Iterator[tuple[int, ...]]:
        """The shape of every slice that has a name, the squarest of a number of chips last.

        Google's tables (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e): up to 32 chips double one
        axis after another; from a cube of 4x4x4 on they are blocks of cubes as near to a cube as
        can be.
        """
        if self.dims == 2:
            yield from ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
            return
        yield from ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
        cubes = self.largest // 64
        sides = [
            (a, b, c)
            for a in range(1, cubes + 1)
            for b in range(a, cubes // a + 1)
            for c in range(b, cubes // (a * b) + 1)
        ]
        for a, b, c in sorted(sides, key=lambda side: (-sum(side), side)):
            yield 4 * a, 4 * b, 4 * c
