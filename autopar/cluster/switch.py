"""Devices on switches in levels: NVLink domains, hosts and the networks between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.cluster.topology import (
    AbstractFabric,
    AbstractTopology,
    CompilerTopology,
    Layout,
    Link,
    LinkLevel,
    Shares,
    SwitchLevel,
    outermost,
)
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts


@dataclass(frozen=True)
class Switch(AbstractTopology):
    """Levels of switches, innermost first; `devices_per_host` share one Python process."""

    kind: ClassVar[str] = "switch"

    levels: tuple[SwitchLevel, ...]
    devices_per_host: int

    def __post_init__(self) -> None:
        if not self.levels or self.devices_per_host < 1:
            raise ClusterError("a switched topology needs one level or more, and hosts of >= 1")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The physical axes, fastest first: the levels."""
        return tuple(level.size for level in self.levels)

    @property
    def hosts(self) -> int:
        """Number of hosts; the last one may be part full."""
        return math.ceil(self.device_count / self.devices_per_host)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the levels."""
        return tuple(level.name for level in self.levels)

    @property
    def switch_levels(self) -> tuple[SwitchLevel, ...]:
        """Its levels, all of them."""
        return self.levels

    def with_figures(self, figures: Mapping[str, float], levels: Sequence[SwitchLevel]) -> Switch:
        """It has no figures but those of its levels."""
        del figures
        return replace(self, levels=tuple(levels))

    def shares(self, sizes: Sequence[int]) -> Shares:
        """The last mesh axis takes what it can of the innermost level, and so on."""
        return greedy_shares(sizes, self.lengths)

    def link_level(self, axis: int, size: int, stride: int) -> LinkLevel:
        """A level of switching: members are as near to one another wherever they are."""
        del stride
        return self.levels[axis].link(size)

    def block(self, extents: Sequence[int]) -> Switch:
        """Part of the outermost level that it crosses, and all within."""
        pairs = list(zip(self.levels, extents, strict=True))
        levels = tuple(replace(level, size=size) for level, size in pairs if size > 1)
        return replace(
            self,
            levels=levels or (replace(self.levels[0], size=1),),
            devices_per_host=min(self.devices_per_host, math.prod(extents)),
        )

    def block_name(self, extents: Sequence[int]) -> str:
        """Hosts first."""
        return "x".join(map(str, reversed(extents)))

    def between(self, distances: Sequence[int], pairs: int, wires: int) -> Link:
        """Each device of the smaller block sends or receives at the rate of one pair."""
        del wires
        return self.levels[outermost(distances)].transfer(pairs)

    def layout(self) -> Layout:
        """A block for each innermost switch, about half as wide again as it is high."""
        inner, hosted = self.levels[0].size, self.devices_per_host
        blocks = self.device_count // inner
        whole = [c for c in range(1, inner + 1) if inner % c == 0]
        fitting = [c for c in whole if 0 in (c % hosted, hosted % c)]
        columns = min(fitting, key=lambda c: abs(c - 1.4 * math.sqrt(inner)))
        noun = "host" if hosted >= inner else self.levels[0].name
        return Layout(
            columns=columns,
            rows=inner // columns,
            blocks=blocks,
            names=tuple(f"{noun} {b}" for b in range(blocks)),
            host=(min(columns, hosted), max(1, hosted // columns)),
            wraps=(False, False),
            linked=False,
            abreast=blocks,
        )

    def compiler_topology(self, chip: str, cluster: str) -> CompilerTopology:
        """ "1 x hosts x devices of a host", where a host is what shares the fastest switch.

        So is a rack of GB200.
        """
        together = max(self.devices_per_host, self.levels[0].size)
        hosts, rest = divmod(self.device_count, together)
        if rest:
            raise ClusterError(
                f"cluster {cluster} has {self.device_count} devices in hosts of "
                f"{together}, one of them part full; compiling ahead of time wants full hosts, "
                f"as in '{hosts + 1}x{together}x{chip}'"
            )
        return CompilerTopology(f"1x{hosts}x{together}")

    def __str__(self) -> str:
        return " x ".join(f"{lv.size} by {lv.name}" for lv in reversed(self.levels))


def greedy_shares(sizes: Sequence[int], lengths: Sequence[int]) -> Shares:
    """Shares where the last mesh axis takes what it can of the nearest physical axis, and so on.

    The greatest common divisor at each turn always works out, prime by prime, because both
    lists have the same product.
    """
    left = list(lengths)
    rows: list[tuple[int, ...]] = []
    for size in reversed(sizes):
        row: list[int] = []
        for p, length in enumerate(left):
            share = math.gcd(size, length)
            size //= share
            left[p] //= share
            row.append(share)
        rows.append(tuple(row))
    return tuple(reversed(rows))


@dataclass(frozen=True)
class SwitchFabric(AbstractFabric):
    """Up to `domain` devices on one fast switch (sizes in the levels are placeholders)."""

    form: ClassVar[re.Pattern[str]] = re.compile(r"(?:(\d+)x)?(\d+)x(?P<chip>[a-z][\w-]*)")

    domain: int
    devices_per_host: int
    inside: SwitchLevel
    network: SwitchLevel

    def read(self, text: str, chip: str, match: re.Match[str]) -> tuple[str, Switch]:
        """A cluster from "8xh100" or "4x8xa100-40gb": devices, or hosts x devices of each."""
        outer, inner, word = match.groups()
        return match[0][: -len(word)] + chip, self._build(text, int(outer or 0), int(inner))

    def hint(self, chip: str) -> str:
        """The form of its names."""
        return f"{chip} has no torus; write a count, as in '8x{chip}'"

    @classmethod
    def larger(cls, match: re.Match[str], factor: int) -> str:
        """More hosts, or more devices where hosts are not told."""
        outer, inner, chip = match.groups()
        if outer:
            return f"{int(outer) * factor}x{inner}x{chip}"
        return f"{int(inner) * factor}x{chip}"

    def local_name(self, chip: str, facts: Sequence[DeviceFacts]) -> str:
        """The number of devices, and of hosts where there are several: one process is on each."""
        hosts = len({f.process_index for f in facts})
        return f"{hosts}x{len(facts) // hosts}x{chip}" if hosts > 1 else f"{len(facts)}x{chip}"

    def _build(self, text: str, outer: int, inner: int) -> Switch:
        domain = self.domain
        if not outer:
            # One number: fill one domain, or whole domains.
            outer, inner = (1, inner) if inner <= domain else (inner // domain, inner)
            if outer > 1 or inner > domain:
                if inner % domain:
                    near = outer * domain
                    raise ClusterError(
                        f"cluster {text!r}: {inner} devices do not fill hosts of {domain}; write a "
                        f"multiple of {domain} (such as {near}), or hosts x devices, as in "
                        f"'{outer}x{domain}x...'"
                    )
                inner = domain
        if outer < 1 or inner < 1 or inner > domain:
            raise ClusterError(
                f"cluster {text!r}: {outer} x {inner} devices; expected at least one of each and "
                f"at most {domain} on one host or rack"
            )
        levels: tuple[SwitchLevel, ...] = (replace(self.inside, size=inner),)
        if outer > 1:
            levels = (*levels, replace(self.network, size=outer))
        return Switch(levels, min(self.devices_per_host, inner))
