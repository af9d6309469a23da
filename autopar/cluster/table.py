"""A cluster's figures as plain tables: to TOML, and back with every fault named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from autopar.cluster.chip import Chip, Source
from autopar.cluster.topology import Level, Switch, Topology, Torus
from autopar.errors import ClusterError

Table = dict[str, object]


def content(chip: Chip, topology: Topology) -> Table:
    """Chip and topology as nested tables of numbers, texts and lists."""
    kind = "torus" if isinstance(topology, Torus) else "switch"
    figures = _plain(chip)
    figures["peak_flops"] = dict(chip.peak_flops)
    return {"chip": figures, kind: _plain(topology)}


def _plain(value: Chip | Topology) -> Table:
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


def read_topology(table: Mapping[str, object], where: str) -> Topology:
    """The topology in a file's [switch] or [torus] table. Raises ClusterError likewise."""
    if ("switch" in table) == ("torus" in table):
        raise ClusterError(f"cluster file {where!r} needs either a [switch] or a [torus] table")
    if "switch" in table:
        switch = _table(table, "switch", where)
        levels = switch.get("levels")
        if not isinstance(levels, list):
            raise ClusterError(f"{where}: [switch] needs a list of [[switch.levels]]")
        fields = _checked(Switch, switch, f"{where}: [switch]")
        rows = cast(list[Table], levels)
        fields["levels"] = tuple(_level(row, f"{where}: [[switch.levels]]") for row in rows)
        return Switch(**fields)
    torus = _table(table, "torus", where)
    fields = _checked(Torus, torus, f"{where}: [torus]")
    if "network" in torus:
        fields["network"] = _level(_table(torus, "network", where), f"{where}: [torus.network]")
    return Torus(**fields)


def _level(table: Mapping[str, object], where: str) -> Level:
    return Level(**_checked(Level, table, where))


def _table(table: Mapping[str, object], key: str, where: str) -> Table:
    entry = table.get(key)
    if not isinstance(entry, dict):
        raise ClusterError(f"{where} needs a table [{key}] (and found {entry!r})")
    return cast(Table, entry)


def _number(key: str, entry: object, where: str) -> float:
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        raise ClusterError(f"{where}: {key} = {entry!r} must be a number")
    return float(entry)


def _checked(
    kind: type[Chip | Source | Level | Switch | Torus], table: Mapping[str, object], where: str
) -> dict[str, Any]:
    """The entries of a table as keyword arguments of `kind`.

    Raises ClusterError on entries that are missing, unknown, or of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(table) - set(fields))
    missing = [
        name
        for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING
    ]
    if unknown or missing:
        raise ClusterError(
            f"{where} lacks {missing} and does not know {unknown}; it has {sorted(fields)}"
        )
    found: dict[str, Any] = {}
    for name, entry in table.items():
        found[name] = _fitted(str(fields[name].type), name, entry, where)
    return found


def _fitted(kind: str, name: str, entry: object, where: str) -> object:
    if kind == "float":
        return _number(name, entry, where)
    if kind == "int" and (isinstance(entry, bool) or not isinstance(entry, int)):
        raise ClusterError(f"{where}: {name} = {entry!r} must be a whole number")
    if kind in ("str", "Platform", "Confidence") and not isinstance(entry, str):
        raise ClusterError(f"{where}: {name} = {entry!r} must be a text")
    if kind.startswith(("tuple[int", "tuple[bool")):
        item = int if "int" in kind else bool
        if not isinstance(entry, list) or any(
            type(e) is not item for e in cast(list[object], entry)
        ):
            raise ClusterError(f"{where}: {name} = {entry!r} must be a list of {item.__name__}s")
        return tuple(cast(list[object], entry))
    return entry


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
