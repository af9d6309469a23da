"""Layers on submeshes: which stage runs what, on how many devices, in which schedule."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.layers import LayerSequence
from autopar.ir.mesh import MeshShape


@dataclass(frozen=True)
class Stage:
    """Layers first..last (both included) on a mesh of their own."""

    first: int
    last: int
    mesh: MeshShape


@dataclass(frozen=True)
class StagePlan:
    """The stages of a step, the number of microbatches, and the schedule that runs them."""

    layers: LayerSequence
    stages: tuple[Stage, ...]
    microbatches: int = 1
    schedule: str = "none"

    def verify(self) -> None:
        """Raise GraphError unless the stages cover the layers in order."""
        expected = 0
        for stage in self.stages:
            if stage.first != expected or stage.last < stage.first:
                raise GraphError(f"stage {stage.first}..{stage.last} should start at {expected}")
            expected = stage.last + 1
        if expected != len(self.layers.layers):
            raise GraphError(f"stages end at layer {expected - 1}, not at the last")

    def __str__(self) -> str:
        lines = [
            f"  S{i}: L{s.first}..L{s.last}  mesh{i} ({s.mesh})" for i, s in enumerate(self.stages)
        ]
        head = f"stages {self.layers.graph.name}  microbatches {self.microbatches} {{"
        return "\n".join([head, *lines, "}"])
