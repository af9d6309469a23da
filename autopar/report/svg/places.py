"""The devices of a cluster on paper: grids of chips side by side, as they are wired."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster, Switch, Torus


@dataclass(frozen=True)
class Places:
    """Blocks of equal grids: the planes of a torus, or the innermost switches.

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


def places_of(cluster: Cluster) -> Places:
    """The blocks of a cluster; z is to the right, slices lie under one another."""
    topology = cluster.topology
    if isinstance(topology, Torus):
        return _planes(topology)
    return _switches(topology)


def _planes(torus: Torus) -> Places:
    x, y, *deep = (*torus.shape, 1)[: max(2, len(torus.shape))]
    bounds = (*torus.host_bounds, 1)
    wraps = (*torus.wraps, False)
    planes = math.prod(deep)
    names = [
        " ".join(
            word for word, count in ((f"slice {s}", torus.slices), (f"z={z}", planes)) if count > 1
        )
        for s in range(torus.slices)
        for z in range(planes)
    ]
    return Places(
        columns=x * torus.devices_per_chip,
        rows=y,
        blocks=planes * torus.slices,
        names=tuple(names),
        host=(bounds[0] * torus.devices_per_chip, bounds[1]),
        wraps=(wraps[0], wraps[1]),
        linked=True,
        abreast=planes if planes > 1 else torus.slices,
    )


def _switches(switch: Switch) -> Places:
    inner, hosted = switch.levels[0].size, switch.devices_per_host
    blocks = switch.device_count // inner
    fitting = [c for c in range(1, inner + 1) if inner % c == 0 and 0 in (c % hosted, hosted % c)]
    columns = min(fitting, key=lambda c: abs(c - 1.4 * math.sqrt(inner)))
    noun = "host" if hosted >= inner else switch.levels[0].name
    return Places(
        columns=columns,
        rows=inner // columns,
        blocks=blocks,
        names=tuple(f"{noun} {b}" for b in range(blocks)),
        host=(min(columns, hosted), max(1, hosted // columns)),
        wraps=(False, False),
        linked=False,
        abreast=blocks,
    )
