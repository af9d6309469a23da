"""What a batch pass is: a graph in, the graph of one microbatch out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractBatching(AbstractPass[Graph, Graph]):
    """Decides how the batch is cut into microbatches."""
