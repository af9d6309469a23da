"""A cluster: one kind of chip, so many of them, wired in one way; its figures as TOML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from autopar.cluster.calibration import Bar, Calibration, Residual, Series
from autopar.cluster.catalog import TOPOLOGIES
from autopar.cluster.chip import Chip, Source
from autopar.cluster.names import larger_name, local_name, read_name
from autopar.cluster.topology import AbstractTopology, SwitchLevel
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


Table = dict[str, object]
# Fields of a topology that are levels of switching, by how a dataclass writes their type.
_LEVELS, _NETWORK = "tuple[SwitchLevel, ...]", "SwitchLevel | None"
_LARGEST, _LARGEST_WHOLE = 1e300, 2**63
# Lists of plain items, by how a dataclass writes their type.
_ITEMS: dict[str, type] = {
    "tuple[int, ...]": int,
    "tuple[bool, ...]": bool,
    "tuple[float, ...]": float,
}


def content(chip: Chip, topology: AbstractTopology) -> Table:
    """Chip and topology as nested tables of numbers, texts and lists."""
    figures = _plain(chip)
    figures["peak_flops"] = dict(chip.peak_flops)
    return {"chip": figures, topology.kind: _plain(topology)}


def measurements(calibration: Calibration) -> Table:
    """A calibration as nested tables likewise."""
    return {"calibration": _plain(calibration)}


def _plain(value: Chip | AbstractTopology | Calibration) -> Table:
    """As JSON would hold it: tuples become lists; absent entries are left out."""
    table = cast(Table, json.loads(json.dumps(dataclasses.asdict(value))))
    return {key: entry for key, entry in table.items() if entry is not None}


def read_chip(table: Mapping[str, object], where: str) -> Chip:
    """The chip in a file's [chip] table. Raises ClusterError naming the entry at fault."""
    chip = _table(table, "chip", where)
    fields = _checked(Chip, chip, f"{where}: [chip]")
    peaks = _table(chip, "peak_flops", f"{where}: [chip]")
    fields["peak_flops"] = tuple((name, _number(name, rate, where)) for name, rate in peaks.items())
    source = _checked(Source, _table(chip, "source", f"{where}: [chip]"), f"{where}: [chip.source]")
    fields["source"] = Source(**source)
    return Chip(**fields)


def read_topology(table: Mapping[str, object], where: str) -> AbstractTopology:
    """The topology in a file's [switch] or [torus] table. Raises ClusterError likewise."""
    kinds = [kind for kind in TOPOLOGIES if kind.kind in table]
    if len(kinds) != 1:
        tables = " or ".join(f"a [{kind.kind}]" for kind in TOPOLOGIES)
        raise ClusterError(f"cluster file {where!r} needs either {tables} table")
    name = kinds[0].kind
    given = _table(table, name, where)
    for entry in dataclasses.fields(kinds[0]):
        if entry.type == _LEVELS and not isinstance(given.get(entry.name), list):
            raise ClusterError(f"{where}: [{name}] needs a list of [[{name}.{entry.name}]]")
    fields = _checked(kinds[0], given, f"{where}: [{name}]")
    for entry in dataclasses.fields(kinds[0]):
        inner = f"{name}.{entry.name}"
        if entry.type == _LEVELS:
            rows = cast(list[Table], fields[entry.name])
            fields[entry.name] = tuple(_level(row, f"{where}: [[{inner}]]") for row in rows)
        elif entry.type == _NETWORK and entry.name in fields:
            row = _table(given, entry.name, where)
            fields[entry.name] = _level(row, f"{where}: [{inner}]")
    build: Callable[..., AbstractTopology] = kinds[0]
    return build(**fields)


def read_calibration(table: Mapping[str, object], where: str) -> Calibration | None:
    """The calibration in a file's [calibration] table, None where it has none."""
    if "calibration" not in table:
        return None
    calibration = _table(table, "calibration", where)
    fields = _checked(Calibration, calibration, f"{where}: [calibration]")
    for name, kind in (("bars", Bar), ("residuals", Residual), ("series", Series)):
        place = f"{where}: [[calibration.{name}]]"
        rows = fields[name]
        if not isinstance(rows, list):
            raise ClusterError(f"{place} must be a list of tables")
        fields[name] = tuple(kind(**_checked(kind, row, place)) for row in cast(list[Table], rows))
    return Calibration(**fields)


def _level(table: Mapping[str, object], where: str) -> SwitchLevel:
    return SwitchLevel(**_checked(SwitchLevel, table, where))


def _table(table: Mapping[str, object], key: str, where: str) -> Table:
    entry = table.get(key)
    if not isinstance(entry, dict):
        raise ClusterError(f"{where} needs a table [{key}] (and found {entry!r})")
    return cast(Table, entry)


def _number(key: str, entry: object, where: str) -> float:
    if isinstance(entry, bool) or not isinstance(entry, int | float) or not abs(entry) < _LARGEST:
        raise ClusterError(f"{where}: {key} = {_shown(entry)} must be a finite number")
    return float(entry)


_Kind = Chip | Source | SwitchLevel | AbstractTopology | Calibration | Bar | Residual | Series


def _checked(kind: type[_Kind], table: object, where: str) -> dict[str, Any]:
    """The entries of a table as keyword arguments of `kind`.

    Raises ClusterError on entries that are missing, unknown, or of another type.
    """
    if not isinstance(table, dict):
        raise ClusterError(f"{where} = {_shown(table)} must be a table")
    given = cast(Table, table)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    unknown = sorted(set(given) - set(fields))
    missing = [
        name
        for name, entry in fields.items()
        if name not in given and entry.default is dataclasses.MISSING
    ]
    if unknown or missing:
        raise ClusterError(
            f"{where} lacks {missing} and does not know {unknown}; it has {sorted(fields)}"
        )
    found: dict[str, Any] = {}
    for name, entry in given.items():
        found[name] = _fitted(str(fields[name].type), name, entry, where)
    return found


def _fitted(kind: str, name: str, entry: object, where: str) -> object:
    if kind == "float":
        return _number(name, entry, where)
    if kind == "int" and (type(entry) is not int or not abs(entry) < _LARGEST_WHOLE):
        raise ClusterError(f"{where}: {name} = {_shown(entry)} must be a whole number of 64 bits")
    if kind in ("str", "Platform", "Confidence") and not isinstance(entry, str):
        raise ClusterError(f"{where}: {name} = {entry!r} must be a text")
    if kind == "tuple[tuple[int, ...], ...]":
        rows = cast(list[object], entry if isinstance(entry, list) else [entry])
        return tuple(_listed("tuple[int, ...]", name, row, where) for row in rows)
    if kind in _ITEMS:
        return _listed(kind, name, entry, where)
    return entry


def _shown(entry: object) -> str:
    """A value as it stands in a message: cut off where it is long."""
    text = ascii(entry) if not isinstance(entry, int) or abs(entry) < _LARGEST else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _listed(kind: str, name: str, entry: object, where: str) -> tuple[object, ...]:
    """A list of items of one type, floats also from whole numbers."""
    item = _ITEMS[kind]
    accepted: tuple[type, ...] = (float, int) if item is float else (item,)
    items = tuple(cast(list[object], entry)) if isinstance(entry, list) else None
    if items is None or any(
        type(e) not in accepted or not abs(cast(float, e)) < _LARGEST_WHOLE for e in items
    ):
        told = _shown(entry)  # pyright: ignore[reportUnknownArgumentType]
        raise ClusterError(f"{where}: {name} = {told} must be a list of {item.__name__}s")
    return tuple(float(cast(float, e)) for e in items) if item is float else items


def to_toml(table: Mapping[str, object]) -> str:
    """Nested tables as TOML text; texts and numbers print as JSON does, which TOML accepts."""
    return "\n".join(_lines(table, "")).strip() + "\n"


def _lines(table: Mapping[str, object], prefix: str) -> list[str]:
    flat: list[str] = []
    nested: list[str] = []
    for key, entry in table.items():
        path = f"{prefix}{key}"
        if isinstance(entry, dict):
            nested += ["", f"[{path}]", *_lines(cast(Table, entry), f"{path}.")]
        elif isinstance(entry, list) and entry and isinstance(entry[0], dict):
            for row in cast(list[Table], entry):
                nested += ["", f"[[{path}]]", *_lines(row, f"{path}.")]
        else:
            flat.append(f"{key} = {json.dumps(entry)}")
    return flat + nested
