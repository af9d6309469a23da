"""Layers that the user cut by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import GraphError
from autopar.ir.batching import Batching
from autopar.ir.stages import LayerSequence
from autopar.passes.base import AbstractLayering, Setting, Single
from autopar.passes.layer.forward_pass import forward_of
from autopar.passes.layer.isomorphism import find_classes
from autopar.passes.layer.sequence import layers_between


@dataclass(frozen=True)
class Fixed(AbstractLayering):
    """The second and later layers begin with the ops `cuts`, by their number in the graph."""

    name: ClassVar[str] = "fixed"
    cuts: tuple[int, ...] = ()

    def run(self, given: Batching, setting: Setting) -> LayerSequence:
        """The layers between the cuts; raises as `between`."""
        return find_classes(self.between(given, setting))

    def between(self, given: Batching, setting: Setting) -> LayerSequence:
        """The layers between the cuts, not compared; one of all ops for a step that is not cut.

        Raises GraphError where one of several layers has no forward op.
        """
        forward = forward_of(given)
        if not self.cuts and not forward.positions:
            return Single().run(given, setting)
        starts = [0, *(sum(i < cut for i in forward.positions) for cut in self.cuts)]
        ends = [*starts[1:], len(forward.positions)]
        if any(a >= b for a, b in zip(starts, ends, strict=True)):
            raise GraphError(
                f"cuts {self.cuts} leave a layer of {given.graph.name} without forward ops, which "
                f"end with op {max(forward.positions, default=-1)}. Give them in rising order."
            )
        return layers_between(given, forward, starts)
