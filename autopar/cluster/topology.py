"""How the devices of a cluster are wired: switches in levels, or a torus."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import ClusterError


@dataclass(frozen=True)
class Level:
    """One level of switching: `size` members, each with `bytes_per_second` into the switch.

    Rates are one-way per *device* and are what collectives reach, not what a data sheet says.
    `latency_seconds` is paid by each step of an algorithm and `start_seconds` once a collective.
    `pair_bytes_per_second` is what one pair of devices reaches alone (0: the same rate), and
    `shuffle_bytes_per_second` what each device reaches when everyone sends to everyone (0: same).
    `local_bytes_per_second` is what a device takes in of its own share, which goes over no wire:
    it is copied, or added to what came (0: for nothing). A switch that adds up by itself (NVLS,
    SHARP) has `reduction_efficiency` > 0, the share of `bytes_per_second` it keeps while doing so,
    after `reduction_start_seconds`.
    """

    name: str
    size: int
    bytes_per_second: float
    latency_seconds: float
    start_seconds: float = 0.0
    pair_bytes_per_second: float = 0.0
    shuffle_bytes_per_second: float = 0.0
    reduction_efficiency: float = 0.0
    reduction_start_seconds: float = 0.0
    local_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        others = (
            self.latency_seconds, self.start_seconds, self.pair_bytes_per_second,
            self.shuffle_bytes_per_second, self.reduction_efficiency,
            self.reduction_start_seconds, self.local_bytes_per_second,
        )  # fmt: skip
        if self.size < 1 or not self.bytes_per_second > 0 or min(others) < 0:
            raise ClusterError(
                f"level {self.name!r} has size={self.size}, "
                f"bytes_per_second={self.bytes_per_second}, "
                f"latency_seconds={self.latency_seconds}; "
                "give a size >= 1, a rate > 0, a latency >= 0, and no other figure below 0"
            )


@dataclass(frozen=True)
class Switch:
    """Levels of switches, innermost first; `devices_per_host` share one Python process."""

    levels: tuple[Level, ...]
    devices_per_host: int

    def __post_init__(self) -> None:
        if not self.levels or self.devices_per_host < 1:
            raise ClusterError("a switched topology needs one level or more, and hosts of >= 1")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The physical axes, fastest first: the levels."""
        return tuple(level.size for level in self.levels)

    @property
    def device_count(self) -> int:
        """How many devices hang on the switches."""
        return math.prod(level.size for level in self.levels)

    @property
    def hosts(self) -> int:
        """How many hosts the devices fill; the last one may be part full."""
        return math.ceil(self.device_count / self.devices_per_host)

    def __str__(self) -> str:
        return " x ".join(f"{lv.size} by {lv.name}" for lv in reversed(self.levels))


@dataclass(frozen=True)
class Torus:
    """A grid of chips whose neighbors are linked, in one slice or several joined by a network.

    `shape` is x, y(, z) in chips, as in "v5p:4x4x8". `wraps` says which axes close into rings.
    `link_bytes_per_second` is one way over one link. `host_bounds` are the chips of one host.
    With `devices_per_chip` 2, each chip counts as two devices, priced as one more axis of links
    (as libtpu does). `full_gather`: all-gathers take the whole buffer's time, not (n-1)/n of it.
    `network` joins several slices; its size is the number of slices.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    link_bytes_per_second: float
    hop_seconds: float
    host_bounds: tuple[int, ...]
    devices_per_chip: int = 1
    full_gather: bool = False
    network: Level | None = None

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
        """How many grids there are."""
        return self.network.size if self.network else 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The physical axes, fastest first: the chip's devices, x, y, z, slices."""
        return (self.devices_per_chip, *self.shape, self.slices)

    @property
    def device_count(self) -> int:
        """How many JAX devices there are, over all slices."""
        return math.prod(self.shape) * self.devices_per_chip * self.slices

    @property
    def hosts(self) -> int:
        """How many hosts drive the chips, over all slices."""
        bounds = zip(self.shape, self.host_bounds, strict=True)
        return self.slices * math.prod(math.ceil(size / bound) for size, bound in bounds)

    def __str__(self) -> str:
        axes = zip(self.shape, self.wraps, strict=True)
        text = " x ".join(f"{size}{' (ring)' if wraps else ''}" for size, wraps in axes)
        text = f"torus {text}"
        if self.devices_per_chip > 1:
            text += f", {self.devices_per_chip} devices a chip"
        return f"{self.slices} slices of {text}" if self.slices > 1 else text


Topology = Switch | Torus
