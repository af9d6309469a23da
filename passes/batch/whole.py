"""The batch as one microbatch: the step as the user wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.passes.base import Setting
from autopar.passes.batch.base import AbstractBatching


@dataclass(frozen=True)
class Whole(AbstractBatching):
    """Leaves the graph as it is."""

    name: ClassVar[str] = "whole"

    def run(self, given: Graph, setting: Setting) -> Graph:
        """The same graph."""
        del setting
        return given
