"""A single layer of all ops, for plans without pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import Batching
from autopar.ir.stages import Layer, LayerSequence
from autopar.passes.base import Setting
from autopar.passes.layer.base import AbstractLayering


@dataclass(frozen=True)
class Single(AbstractLayering):
    """Puts all ops in one layer."""

    name: ClassVar[str] = "single"

    def run(self, given: Batching, setting: Setting) -> LayerSequence:
        """A sequence of one layer; of none for a step without ops."""
        del setting
        graph = given.graph
        count = len(graph.ops)
        layers = (Layer(0, count - 1, graph.flops, 0),) if count else ()
        return LayerSequence(graph, layers)
