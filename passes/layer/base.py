"""What a layering pass is: a graph in, its ops in consecutive layers out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.layers import LayerSequence
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractLayering(AbstractPass[Graph, LayerSequence]):
    """Groups ops into layers, the smallest pieces that stages are made of."""
