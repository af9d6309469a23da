"""A cluster's figures as plain tables: to TOML, and back with every fault named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from autopar.cluster.calibration import Bar, Calibration, Residual, Series
from autopar.cluster.catalog import TOPOLOGIES
from autopar.cluster.chip import Chip, Source
from autopar.cluster.topology import AbstractTopology, SwitchLevel
from autopar.errors import ClusterError

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
    for field in dataclasses.fields(kinds[0]):
        if field.type == _LEVELS and not isinstance(given.get(field.name), list):
            raise ClusterError(f"{where}: [{name}] needs a list of [[{name}.{field.name}]]")
    fields = _checked(kinds[0], given, f"{where}: [{name}]")
    for field in dataclasses.fields(kinds[0]):
        inner = f"{name}.{field.name}"
        if field.type == _LEVELS:
            rows = cast(list[Table], fields[field.name])
            fields[field.name] = tuple(_level(row, f"{where}: [[{inner}]]") for row in rows)
        elif field.type == _NETWORK and field.name in fields:
            row = _table(given, field.name, where)
            fields[field.name] = _level(row, f"{where}: [{inner}]")
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
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(given) - set(fields))
    missing = [
        name
        for name, field in fields.items()
        if name not in given and field.default is dataclasses.MISSING
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
