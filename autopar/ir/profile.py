"""Profiles: what each layer of a model takes, holds and hands on, as PipeDream published them.

    {"model": str, "layers": [{"name", "op", "forward_ms", "backward_ms", "activation_bytes",
    "parameter_bytes"}, ...], "edges": [[producer, consumer], ...]}

Times are milliseconds of one minibatch on one device. `layers` stand in a topological order. Other
keys, such as "source" and "units", are notes: they are read past. A file may be of others, so what
is wrong with it is listed whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError, listing
from autopar.ir.codec import Codec, Json
from autopar.ir.text import columns, show_bytes, show_seconds
from autopar.ir.text_file import read_text, write_text

REMEDY = "Mend the file; `autopar profile FILE.py:FUNCTION` writes one of a model of yours."
_LARGEST = 2.0**63


@dataclass(frozen=True)
class ProfileLayer:
    """A layer: its times in ms of one minibatch, the bytes of its output and of its weights."""

    name: str
    op: str
    forward_ms: float
    backward_ms: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def compute_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Chain:
    """Layers 1..N in a line; `cut_bytes[i - 1]` cross from layers 1..i to those after."""

    layers: tuple[ProfileLayer, ...]
    cut_bytes: tuple[int, ...]

    @property
    def compute_ms(self) -> float:
        """A minibatch on one device, forward and backward."""
        return math.fsum(layer.compute_ms for layer in self.layers)


@dataclass(frozen=True)
class Profile:
    """The layers of a model in a topological order, and (producer, consumer) edges by name."""

    model: str
    layers: tuple[ProfileLayer, ...]
    edges: tuple[tuple[str, str], ...]
    source: str = ""

    def verify(self) -> None:
        """Raise InputError, listing every fault, unless the layers and edges make sense."""
        faults = [f for i, layer in enumerate(self.layers) for f in _layer_faults(i, layer)]
        faults += _name_faults(self.layers)
        at = {layer.name: i for i, layer in enumerate(self.layers)}
        faults += [f for edge in self.edges for f in _edge_faults(edge, at)]
        if not self.layers:
            faults.append("it has no layers")
        if faults:
            raise InputError(listing(f"profile {self.model!r} cannot be used:", faults, REMEDY))

    def chain(self) -> Chain:
        """The line of layers that stages are cut from, without what only feeds or drops data.

        Left out are sources whose op starts with "Input" and sinks whose op starts with
        "__getitem__". A tensor with several readers counts once in each cut that it crosses.
        Raises InputError where nothing is left.
        """
        consumed = {producer for producer, _ in self.edges}
        fed = {consumer for _, consumer in self.edges}
        kept = tuple(
            layer
            for layer in self.layers
            if not (layer.op.startswith("Input") and layer.name not in fed)
            and not (layer.op.startswith("__getitem__") and layer.name not in consumed)
        )
        if not kept:
            raise InputError(
                f"profile {self.model!r} has only Input layers and unused outputs: nothing is left "
                "to make stages of"
            )
        return Chain(kept, _cut_bytes(kept, self.edges))

    def __str__(self) -> str:
        rows = [
            [layer.name, layer.op, f"forward {show_seconds(layer.forward_ms / 1e3)}",
             f"backward {show_seconds(layer.backward_ms / 1e3)}",
             f"out {show_bytes(layer.activation_bytes)}",
             f"parameters {show_bytes(layer.parameter_bytes)}"]
            for layer in self.layers
        ]  # fmt: skip
        return "\n".join([f"profile {self.model} {{", *columns(rows, "  "), "}"])


def _cut_bytes(
    layers: tuple[ProfileLayer, ...], edges: tuple[tuple[str, str], ...]
) -> tuple[int, ...]:
    """Bytes that cross after each layer: a tensor goes from its layer to its last reader."""
    at = {layer.name: i for i, layer in enumerate(layers)}
    last = list(range(len(layers)))
    for producer, consumer in edges:
        if producer in at and consumer in at:
            last[at[producer]] = max(last[at[producer]], at[consumer])
    change = [0] * (len(layers) + 1)
    for i, layer in enumerate(layers):
        change[i] += layer.activation_bytes
        change[last[i]] -= layer.activation_bytes
    cuts: list[int] = []
    crossing = 0
    for i in range(len(layers)):
        crossing += change[i]
        cuts.append(crossing)
    return tuple(cuts)


def _layer_faults(index: int, layer: ProfileLayer) -> list[str]:
    figures = (
        ("forward_ms", layer.forward_ms),
        ("backward_ms", layer.backward_ms),
        ("activation_bytes", layer.activation_bytes),
        ("parameter_bytes", layer.parameter_bytes),
    )
    return [
        f"layer {index + 1}, {layer.name!r}: {name} is {figure}; give a number from 0 to 2**63"
        for name, figure in figures
        if not 0 <= figure <= _LARGEST
    ]


def _name_faults(layers: tuple[ProfileLayer, ...]) -> list[str]:
    seen: dict[str, int] = {}
    faults: list[str] = []
    for i, layer in enumerate(layers):
        if layer.name in seen:
            faults.append(
                f"layers {seen[layer.name] + 1} and {i + 1} are both named {layer.name!r}"
            )
        seen.setdefault(layer.name, i)
    return faults


def _edge_faults(edge: tuple[str, str], at: Mapping[str, int]) -> list[str]:
    producer, consumer = edge
    unknown = [name for name in edge if name not in at]
    if unknown:
        return [f"edge {producer!r} -> {consumer!r}: no layer is named {unknown[0]!r}"]
    if at[producer] < at[consumer]:
        return []
    if producer == consumer:
        return [f"edge {producer!r} -> {consumer!r} goes from a layer to itself"]
    return [
        f"edge {producer!r} -> {consumer!r} goes backwards, from layer {at[producer] + 1} to layer "
        f"{at[consumer] + 1}: list the layers in a topological order"
    ]


# -- files -----------------------------------------------------------------------------------------

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
        raise InputError(listing(f"{where} cannot be used:", reader.faults, REMEDY))
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
