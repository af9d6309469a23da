"""A cluster: one kind of chip, so many of them, wired in one way."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from autopar.cluster.calibration import Calibration
from autopar.cluster.chip import Chip
from autopar.cluster.local import local_name
from autopar.cluster.names import larger_name, read_name
from autopar.cluster.table import (
    Table,
    content,
    measurements,
    read_calibration,
    read_chip,
    read_topology,
    to_toml,
)
from autopar.cluster.topology import AbstractTopology
from autopar.errors import ClusterError
from autopar.ir.text import columns, show_bytes, show_count, show_seconds

_MOST_DEVICES = 2**24
_SHOWN = 200


@dataclass(frozen=True)
class Cluster:
    """Equal devices and the wires between them; nothing about meshes.

    `calibration` is what the figures were fitted to, where they were measured here.
    """

    name: str
    chip: Chip
    topology: AbstractTopology
    calibration: Calibration | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.device_count > _MOST_DEVICES:
            raise ClusterError(
                f"cluster {self.name[:40]!a} has more than {_MOST_DEVICES:,} devices, which no "
                "cluster has: look at its sizes"
            )

    @property
    def device_count(self) -> int:
        """Number of JAX devices."""
        return self.topology.device_count

    @property
    def memory_bytes(self) -> int:
        """Usable memory of one device, in bytes."""
        return self.chip.memory_bytes

    @property
    def hosts(self) -> int:
        """Number of hosts, each with one Python process."""
        return self.topology.hosts

    @classmethod
    def parse(cls, given: Cluster | str | Path) -> Cluster:
        """A cluster from its name, "local", the path of a .toml file, or itself.

        Raises ClusterError naming the accepted forms where nothing fits.
        """
        if isinstance(given, Cluster):
            return given
        if isinstance(given, Path) or given.endswith(".toml"):
            return cls.from_toml(given)
        if given.strip().lower() == "local":
            return cls.local()
        return cls(*read_name(given))

    def times(self, factor: int) -> Cluster:
        """So many times the devices, more hosts or a larger slice of the same kind.

        Raises ClusterError where there is no such cluster, or where this one has figures of its own
        that its name does not tell.
        """
        name = larger_name(self.name, factor)
        if Cluster(*read_name(self.name)) != self:
            raise ClusterError(f"cluster {self.name} is not what its name says")
        return Cluster(*read_name(name))

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """A cluster from a file as `to_toml` writes it.

        With `like = "8xh100"` the file may give only the figures that differ from that cluster.
        Raises ClusterError where the file cannot be read, or an entry is missing or misfit.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # no UTF-8, or a NUL in the path
            why = error.strerror if isinstance(error, OSError) else "it is no text file"
            raise ClusterError(
                f"cluster file {str(path)[:_SHOWN]!a} cannot be read: {why}; "
                "give the path of a TOML file as Cluster.to_toml() writes it"
            ) from error
        return cls.from_toml_text(text, str(path))

    @classmethod
    def from_toml_text(cls, text: str, where: str = "<text>") -> Cluster:
        """A cluster from the text of such a file; `where` names it in errors."""
        try:
            table = cast(Table, tomllib.loads(text))
        except (ValueError, RecursionError) as error:  # of numbers, of 5,000 digits
            raise ClusterError(f"cluster file {where!r} is not TOML: {error}") from error
        like = table.pop("like", None)
        if isinstance(like, str):
            try:
                base = cls.parse(like)
            except RecursionError:
                raise ClusterError(f"cluster file {where!a} is like itself, by {like!a}") from None
            table = _merged({"name": base.name, **content(base.chip, base.topology)}, table)
        name = table.get("name")
        if not isinstance(name, str):
            raise ClusterError(f"cluster file {where!r} needs name = '...' (and found {name!r})")
        return cls(
            name,
            read_chip(table, where),
            read_topology(table, where),
            read_calibration(table, where),
        )

    def to_toml(self) -> str:
        """The whole content as TOML; `from_toml` of it gives an equal cluster."""
        measured = measurements(self.calibration) if self.calibration else {}
        return to_toml({"name": self.name, **content(self.chip, self.topology), **measured})

    @classmethod
    def local(cls) -> Cluster:
        """The cluster of the devices that are present (of the whole job, on several hosts).

        Raises ClusterError where they differ in kind or are not in the catalog.
        """
        # JAX is imported only when the devices are asked for: this room plans without it.
        from autopar.frontend.devices import local_devices

        facts = local_devices()
        cluster = cls(*read_name(local_name(facts)))
        memory = min(f.memory_bytes for f in facts)
        if memory:
            cluster = replace(cluster, chip=replace(cluster.chip, memory_bytes=memory))
        return cluster

    def fingerprint(self) -> str:
        """A sha256, in hex, of every figure that plans rest on; two names of a cluster share it."""
        text = json.dumps(content(self.chip, self.topology), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        chip = self.chip
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        peak = ", ".join(f"{dtype} {show_count(rate, 'FLOP/s')}" for dtype, rate in chip.peak_flops)
        rows = [
            ["devices", f"{self.device_count} x {chip.name} ({chip.platform}) on {hosts}"],
            ["peak", peak],
            [
                "memory",
                f"{show_bytes(chip.memory_bytes)} usable, "
                f"{show_count(chip.memory_bytes_per_second, 'B/s')}",
            ],
            ["topology", str(self.topology)],
            *_link_rows(self.topology),
            [
                "source",
                f"{chip.source.what} ({chip.source.date}, confidence {chip.source.confidence})",
            ],
        ]
        return "\n".join([f"cluster {self.name}", *columns(rows, indent="  ")])


def _link_rows(topology: AbstractTopology) -> list[list[str]]:
    rows: list[list[str]] = []
    if link := topology.direct_link:
        rate, hop = show_count(link.bytes_per_second, "B/s"), show_seconds(link.hop_seconds)
        rows.append(["link", f"{rate} one way, {hop} a hop"])
    for level in topology.switch_levels:
        text = f"{show_count(level.bytes_per_second, 'B/s')} one way per device"
        rows.append([level.name, f"{text}, {show_seconds(level.latency_seconds)} a step"])
    return rows


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> Table:
    """`base` with the entries of `over` on top, table by table."""
    merged = dict(base)
    for key, entry in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(entry, dict):
            merged[key] = _merged(cast(Table, below), cast(Table, entry))
        else:
            merged[key] = entry
    return merged
