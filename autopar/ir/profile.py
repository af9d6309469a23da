"""Profiles: what each layer of a model takes, holds and hands on, as PipeDream published them.

    {"model": str, "layers": [{"name", "op", "forward_ms", "backward_ms", "activation_bytes",
    "parameter_bytes"}, ...], "edges": [[producer, consumer], ...]}

Times are milliseconds of one minibatch on one device. `layers` stand in a topological order. Other
keys, such as "source" and "units", are notes: they are read past.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import InputError, bulleted
from autopar.ir.text import columns, show_bytes, show_seconds

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
            raise InputError(bulleted(f"profile {self.model!r} cannot be used:", faults, REMEDY))

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
