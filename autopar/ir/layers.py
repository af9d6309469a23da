"""A step cut into layers: consecutive ranges of ops, and what crosses each cut."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.text import columns, show_bytes, show_count


@dataclass(frozen=True)
class Layer:
    """Ops first..last (both included) of the graph.

    `name` is the user's module path; `same_as` is the first layer that is like this one, and so
    need not be priced again (-1: none before it).
    """

    first: int
    last: int
    flops: int
    cut_bytes: int  # bytes that cross to later layers
    name: str = ""
    same_as: int = -1

    @property
    def op_count(self) -> int:
        """The number of ops of the layer."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class LayerSequence:
    """A graph whose forward ops lie in layers that follow one another.

    What comes after the last layer (backward, update) has its home with a layer too: `homes` has
    a layer for every op, -1 for one that runs wherever it is read (scalars that join layers, what
    no layer owns). `input_homes` are the layers that read each graph input, the first of them its
    own: where a state leaf lives and is updated. Both are empty where all is one layer.
    """

    graph: Graph
    layers: tuple[Layer, ...]
    homes: tuple[int, ...] = ()
    input_homes: tuple[tuple[int, ...], ...] = ()

    def verify(self) -> None:
        """Raise GraphError unless the layers follow one another from op 0 within the graph."""
        expected, count = 0, len(self.graph.ops)
        for layer in self.layers:
            if layer.first != expected or layer.last < layer.first:
                raise GraphError(f"layer {layer.first}..{layer.last} should start at {expected}")
            expected = layer.last + 1
        if expected > count or (expected < count and not self.homes):
            raise GraphError(f"layers end at op {expected - 1} of {count - 1}")
        if self.homes and len(self.homes) != count:
            raise GraphError(f"{len(self.homes)} homes for {count} ops")

    def __str__(self) -> str:
        rows = [
            [f"L{i}:", f"ops {layer.first}..{layer.last}", show_count(layer.flops, "FLOP"),
             f"cut {show_bytes(layer.cut_bytes)}", layer.name,
             f"as L{layer.same_as}" if layer.same_as >= 0 else ""]
            for i, layer in enumerate(self.layers)
        ]  # fmt: skip
        return "\n".join([f"layers {self.graph.name} {{", *columns(rows, "  "), "}"])
