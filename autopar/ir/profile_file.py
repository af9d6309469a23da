"""Profiles as files. They may be others' work, so everything wrong with one is listed at once."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.errors import InputError, bulleted
from autopar.ir.codec import Codec, Json
from autopar.ir.profile import REMEDY, Profile, ProfileLayer
from autopar.ir.text_file import read_text, write_text

_UNITS: dict[str, Json] = {
    "forward_ms": "milliseconds per minibatch on one device",
    "backward_ms": "milliseconds per minibatch on one device",
    "activation_bytes": "bytes of the layer's output for one minibatch",
    "parameter_bytes": "bytes of the layer's weights",
}


def profile_to_json(profile: Profile) -> str:
    """The profile as text: the same profile gives the same bytes."""
    layers = ",\n".join(
        f"  {json.dumps(Codec().write(ProfileLayer, layer))}" for layer in profile.layers
    )
    edges = ",\n".join(f"  {json.dumps(edge)}" for edge in profile.edges)
    head = ",\n".join(
        f' "{key}": {json.dumps(value)}'
        for key, value in (
            ("model", profile.model), ("source", profile.source), ("units", _UNITS),
        )
    )  # fmt: skip
    return f'{{\n{head},\n "layers": [\n{layers}\n ],\n "edges": [\n{edges}\n ]\n}}\n'


def profile_from_json(text: str, where: str = "the profile") -> Profile:
    """The profile of a text.

    Raises InputError that lists every layer and edge that is missing something or wrong.
    """
    try:
        data: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {error}. {REMEDY}") from None
    reader = _Reader()
    profile = reader.profile(data)
    if reader.faults:
        raise InputError(bulleted(f"{where} cannot be used:", reader.faults, REMEDY))
    try:
        profile.verify()
    except InputError as error:
        _, _, rest = str(error).partition("\n")
        raise InputError(f"{where} cannot be used:\n{rest}") from None
    return profile


def load_profile(path: str | Path) -> Profile:
    """Read a profile; raises InputError where there is none or it cannot be used."""
    return profile_from_json(read_text(path, "profile"), f"profile {str(path)!r}")


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile as JSON; raises InputError where the file cannot be written."""
    write_text(profile_to_json(profile), path)


class _Reader:
    """Reads the parts of a profile out of JSON and gathers what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def profile(self, data: Json) -> Profile:
        """The profile, to be used only where there are no faults."""
        if not isinstance(data, dict):
            self.faults.append("it is not an object with 'layers' and 'edges'")
            return Profile("", (), ())
        layers = tuple(self._layer(i, d) for i, d in enumerate(self._list(data, "layers")))
        edges = tuple(self._edge(i, d) for i, d in enumerate(self._list(data, "edges")))
        model, source = data.get("model", ""), data.get("source", "")
        if not isinstance(model, str):
            self.faults.append(f"'model' is {json.dumps(model)}; give the model's name")
        told = source if isinstance(source, str) else json.dumps(source)
        return Profile(str(model), layers, edges, told)

    def _list(self, data: dict[str, Json], name: str) -> list[Json]:
        found = data.get(name)
        if isinstance(found, list):
            return found
        self.faults.append(
            f"{name!r} is missing" if name not in data else f"{name!r} is not a list"
        )
        return []

    def _layer(self, index: int, data: Json) -> ProfileLayer:
        entry = data if isinstance(data, dict) else {}
        name, op = entry.get("name"), entry.get("op", "")
        where = f"layer {index + 1}" + (f", {name!r}" if isinstance(name, str) else "")
        if not isinstance(data, dict):
            self.faults.append(f"{where} is {json.dumps(data)}, not an object")
        elif not isinstance(name, str) or not name:
            self.faults.append(f"{where} has no name")
        elif not isinstance(op, str):
            self.faults.append(f"{where}: op is {json.dumps(op)}; give text")
        return ProfileLayer(
            str(name),
            str(op),
            self._number(entry, "forward_ms", where),
            self._number(entry, "backward_ms", where),
            self._bytes(entry, "activation_bytes", where),
            self._bytes(entry, "parameter_bytes", where),
        )

    def _number(self, entry: dict[str, Json], name: str, where: str) -> float:
        found = entry.get(name)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
        if entry:
            is_there = name in entry
            self.faults.append(
                f"{where}: {name} is {json.dumps(found) if is_there else 'missing'}; give a number"
            )
        return 0

    def _bytes(self, entry: dict[str, Json], name: str, where: str) -> int:
        found = self._number(entry, name, where)
        if found % 1 != 0:
            self.faults.append(f"{where}: {name} is {found}; give a whole number of bytes")
            return 0
        return int(found)

    def _edge(self, index: int, data: Json) -> tuple[str, str]:
        if isinstance(data, list) and len(data) == 2:
            producer, consumer = data
            if isinstance(producer, str) and isinstance(consumer, str):
                return producer, consumer
        self.faults.append(
            f"edge {index + 1} is {json.dumps(data)}; give [producer, consumer], two names"
        )
        return "", ""
