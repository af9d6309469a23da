"""The slot of the stage pass: from layers to stages on submeshes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.layers import LayerSequence
from autopar.ir.stages import StagePlan
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractStaging(AbstractPass[LayerSequence, StagePlan]):
    """Gives ranges of layers to submeshes."""
