"""A step cut into layers: consecutive ranges of ops, and what crosses each cut."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.text import columns, show_bytes, show_count


@dataclass(frozen=True)
class Layer:
    """Ops first..last (both included) of the graph."""

    first: int
    last: int
    flops: int
    cut_bytes: int  # bytes that cross to later layers

    @property
    def op_count(self) -> int:
        """How many ops the layer has."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class LayerSequence:
    """A graph with its ops in layers that follow one another and leave none out."""

    graph: Graph
    layers: tuple[Layer, ...]

    def verify(self) -> None:
        """Raise GraphError unless the layers cover the ops in order."""
        expected = 0
        for layer in self.layers:
            if layer.first != expected or layer.last < layer.first:
                raise GraphError(f"layer {layer.first}..{layer.last} should start at {expected}")
            expected = layer.last + 1
        if expected != len(self.graph.ops):
            raise GraphError(f"layers end at op {expected - 1} of {len(self.graph.ops) - 1}")

    def __str__(self) -> str:
        rows = [
            [f"L{i}:", f"ops {layer.first}..{layer.last}", show_count(layer.flops, "FLOP"),
             f"cut {show_bytes(layer.cut_bytes)}"]
            for i, layer in enumerate(self.layers)
        ]  # fmt: skip
        return "\n".join([f"layers {self.graph.name} {{", *columns(rows, "  "), "}"])
