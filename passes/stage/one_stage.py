"""A single stage on the whole mesh: the answer "do not pipeline"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.stages import LayerSequence, Stage, StagePlan, Submesh
from autopar.passes.base import AbstractPass, Setting


@dataclass(frozen=True)
class One(AbstractPass[LayerSequence, StagePlan]):
    """Puts all layers in one stage."""

    name: ClassVar[str] = "one"
    stages: ClassVar[int] = 1
    microbatches: ClassVar[int] = 1
    schedule: ClassVar[None] = None

    def run(self, given: LayerSequence, setting: Setting) -> StagePlan:
        """A plan of one stage."""
        whole = Stage(0, len(given.layers) - 1)
        return StagePlan(given, (whole,), (Submesh(setting.mesh),))
