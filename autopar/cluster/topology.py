"""The interface of every interconnect, and the records in which it answers.

A topology has physical axes, listed fastest first as JAX numbers devices: levels of switches, or a
chip's devices, x, y, z and slices. To add an interconnect, write a file beside `switch.py` and
`torus.py` with a topology and a fabric of its own, and add them to the rows of `catalog.py`.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts

# `shares[m][p]` is the part of physical axis p that mesh axis m takes: the shares of a mesh axis
# multiply to its size, those of a physical axis to its length. Within a physical axis the faster
# mesh axis takes the nearer devices.
Shares = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinkLevel:
    """A physical level that a group of devices spans, as one member of the group sees it.

    `kind` names the formula that prices it, of `FORMULAS` in `cost.collective`. `bytes_per_second`
    is one-way per device over all links it can use at this level, and `pair_bytes_per_second` that
    of one transfer to one neighbor. On a torus a level is one direction; `wraps` says it closes
    into a ring. `reduces_in_switch` is the share of the rate that the switch keeps while adding up,
    None where it cannot; `local_bytes_per_second` is None where a device's own share takes no time;
    `small` is the level as small messages see it, None where they are sent as all others. See
    SwitchLevel for the other figures.
    """

    name: str
    kind: str
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
    small: LinkLevel | None = None

    @property
    def joined(self) -> LinkLevel:
        """The level as a collective sees it that others, with which it runs, have started."""
        if self.small is None:
            return self
        sooner = max(0.0, self.start_seconds - self.small.start_seconds)
        return replace(
            self,
            start_seconds=self.start_seconds - sooner,
            reduction_start_seconds=max(0.0, self.reduction_start_seconds - sooner),
            small=None,
        )


@dataclass(frozen=True)
class Link:
    """The link between two blocks: seconds to start, then bytes a second over all wires."""

    start_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: float) -> float:
        """Seconds until `nbytes` have arrived; 0 where there are none."""
        return self.start_seconds + nbytes / self.bytes_per_second if nbytes > 0 else 0.0


@dataclass(frozen=True)
class SwitchLevel:
    """A level of switching: `size` members, each with `bytes_per_second` into the switch.

    Rates are one-way per *device* and are what collectives reach, not what a data sheet says.
    `latency_seconds` is paid by each step of an algorithm and `start_seconds` once a collective.
    `pair_bytes_per_second` is what one pair of devices reaches alone (0: the same rate), and
    `shuffle_bytes_per_second` what each device reaches when everyone sends to everyone (0: same).
    `local_bytes_per_second` is what a device takes in of its own share, which goes over no wire:
    it is copied, or added to what came (0: for nothing). A switch that adds up by itself (NVLS,
    SHARP) has `reduction_efficiency` > 0, the share of `bytes_per_second` it keeps while doing so,
    after `reduction_start_seconds`. Small messages may be sent another way, which starts after
    `small_start_seconds` and reaches the share `small_rate` of all rates (0: there is none): NCCL
    has one inside a host, where the pairs of an all-to-all are under way together, too.
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
    small_start_seconds: float = 0.0
    small_rate: float = 0.0

    def __post_init__(self) -> None:
        others = (
            self.latency_seconds, self.start_seconds, self.pair_bytes_per_second,
            self.shuffle_bytes_per_second, self.reduction_efficiency,
            self.reduction_start_seconds, self.local_bytes_per_second,
            self.small_start_seconds, self.small_rate,
        )  # fmt: skip
        if self.size < 1 or not self.bytes_per_second > 0 or min(others) < 0:
            raise ClusterError(
                f"level {self.name!r} has size={self.size}, "
                f"bytes_per_second={self.bytes_per_second}, "
                f"latency_seconds={self.latency_seconds}; "
                "give a size >= 1, a rate > 0, a latency >= 0, and no other figure below 0"
            )
        if self.small_rate > 1:
            raise ClusterError(
                f"level {self.name!r} has small_rate={self.small_rate}; it is the share of the "
                "rates that small messages reach: give 0 (they are sent as all others) to 1"
            )

    def link(self, size: int) -> LinkLevel:
        """The level as a group of `size` members sees it."""
        level = LinkLevel(
            name=self.name,
            kind="switch",
            size=size,
            bytes_per_second=self.bytes_per_second,
            pair_bytes_per_second=self.pair_bytes_per_second or self.bytes_per_second,
            shuffle_bytes_per_second=self.shuffle_bytes_per_second or self.bytes_per_second,
            latency_seconds=self.latency_seconds,
            start_seconds=self.start_seconds,
            reduces_in_switch=self.reduction_efficiency or None,
            reduction_start_seconds=self.reduction_start_seconds,
            local_bytes_per_second=self.local_bytes_per_second or None,
        )
        if not self.small_rate:
            return level
        share, local = self.small_rate, level.local_bytes_per_second
        small = replace(
            level,
            start_seconds=self.small_start_seconds,
            bytes_per_second=share * level.bytes_per_second,
            shuffle_bytes_per_second=share * level.shuffle_bytes_per_second,
            local_bytes_per_second=share * local if local else None,
            reduces_in_switch=None,
        )
        return replace(level, small=small)

    def transfer(self, pairs: int) -> Link:
        """The link of so many pairs of devices together, each device in one pair."""
        rate = self.pair_bytes_per_second or self.bytes_per_second
        start = self.small_start_seconds if self.small_rate else self.start_seconds
        return Link(start + self.latency_seconds, pairs * rate)


@dataclass(frozen=True)
class DirectLink:
    """A link from chip to chip that no switch stands in: one way over one link."""

    bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True)
class Layout:
    """The places of devices on paper: blocks of equal grids, such as planes, or innermost switches.

    Devices are numbered block after block, and in one row after row. A host is `host` cells wide
    and high. `wraps` says whether a block's rows and columns close into rings; where neighbours of
    a grid are not linked, `linked` is false. A row of blocks has `abreast` of them.
    """

    columns: int
    rows: int
    blocks: int
    names: tuple[str, ...]
    host: tuple[int, int]
    wraps: tuple[bool, bool]
    linked: bool
    abreast: int

    @property
    def size(self) -> int:
        """Devices of a block."""
        return self.columns * self.rows

    def host_of(self, device: int) -> tuple[int, int, int]:
        """The host of a device: its block, and the host's column and row in it."""
        block, inside = divmod(device, self.size)
        row, column = divmod(inside, self.columns)
        return block, column // self.host[0], row // self.host[1]


@dataclass(frozen=True)
class CompilerTopology:
    """The wiring as a compiler is told it; see `Target`."""

    text: str
    slices: int = 1
    host_bounds: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    devices_per_chip: int = 1


@dataclass(frozen=True)
class AbstractTopology(abc.ABC):
    """The wiring of the devices of a cluster. `kind` names its table in a cluster file."""

    kind: ClassVar[str]

    # -- its size ----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """The physical axes, fastest first; they multiply to the devices."""

    @property
    @abc.abstractmethod
    def axis_names(self) -> tuple[str, ...]:
        """The name of each physical axis, which its `LinkLevel` has too."""

    @property
    @abc.abstractmethod
    def hosts(self) -> int:
        """Number of hosts; the last one may be part full."""

    @property
    def device_count(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.lengths)

    # -- its figures -------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def switch_levels(self) -> tuple[SwitchLevel, ...]:
        """Its levels of switching, innermost first."""

    @property
    def direct_link(self) -> DirectLink | None:
        """Its links from chip to chip, None where all goes through switches."""
        return None

    @property
    def own_figures(self) -> Mapping[str, float]:
        """The figures beside those of its levels that a calibration fits, by field."""
        return {}

    @abc.abstractmethod
    def with_figures(
        self, figures: Mapping[str, float], levels: Sequence[SwitchLevel]
    ) -> AbstractTopology:
        """The same wiring with other `own_figures` and `switch_levels`."""

    # -- meshes and blocks on it -------------------------------------------------------------

    @abc.abstractmethod
    def shares(self, sizes: Sequence[int]) -> Shares:
        """The parts of the physical axes that the axes of a mesh take, slowest first."""

    @abc.abstractmethod
    def link_level(self, axis: int, size: int, stride: int) -> LinkLevel:
        """A physical axis as a group sees it: `size` members, each `stride` devices apart."""

    @abc.abstractmethod
    def block(self, extents: Sequence[int]) -> AbstractTopology:
        """The topology of a block that has these extents along the physical axes."""

    @abc.abstractmethod
    def block_name(self, extents: Sequence[int]) -> str:
        """Its sizes in the order in which the cluster's own name has them."""

    @abc.abstractmethod
    def between(self, distances: Sequence[int], pairs: int, wires: int) -> Link:
        """The link between two blocks, so many steps apart along each physical axis.

        `pairs` are the devices of the smaller block, `wires` those on the smaller face along the
        outermost axis that parts them.
        """

    # -- on paper and for a compiler ---------------------------------------------------------

    @abc.abstractmethod
    def layout(self) -> Layout:
        """The places where its devices are drawn."""

    @abc.abstractmethod
    def compiler_topology(self, chip: str, cluster: str) -> CompilerTopology:
        """Its name for a compiler. Raises ClusterError, naming the cluster, where it has none."""


def outermost(distances: Sequence[int]) -> int:
    """The slowest physical axis along which two blocks are apart."""
    return max((p for p, distance in enumerate(distances) if distance), default=0)


@dataclass(frozen=True)
class AbstractFabric(abc.ABC):
    """The joints between chips of a kind, whatever their number, and the names of their clusters.

    `form` matches a name, of which the group "chip" is the chip.
    """

    form: ClassVar[re.Pattern[str]]

    @abc.abstractmethod
    def read(self, text: str, chip: str, match: re.Match[str]) -> tuple[str, AbstractTopology]:
        """The full name and the topology of a cluster whose name has the form.

        Raises ClusterError, which quotes `text`, where no such cluster can be built.
        """

    @abc.abstractmethod
    def hint(self, chip: str) -> str:
        """Advice where a name of the chip has another form."""

    @classmethod
    @abc.abstractmethod
    def larger(cls, match: re.Match[str], factor: int) -> str:
        """The name of a cluster with a power of two times the devices."""

    @abc.abstractmethod
    def local_name(self, chip: str, facts: Sequence[DeviceFacts]) -> str:
        """The name of the cluster that local devices of one chip make up.

        Raises ClusterError where what they tell of themselves is not enough.
        """

    def by_count(self, text: str, chip: str, slices: str | None, count: str) -> str | None:
        """The name that "v5p-64" stands for: a chip and a count. None where it stands for none."""
        del text, chip, slices, count
        return None
