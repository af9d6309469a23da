"""The batch as one microbatch: the step as the user wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import BatchGraphs, Batching
from autopar.passes.base import Setting
from autopar.passes.batch.base import AbstractBatching


@dataclass(frozen=True)
class Whole(AbstractBatching):
    """Leaves the step as it is."""

    name: ClassVar[str] = "whole"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The whole step, run once."""
        del setting
        return Batching.whole(given.whole)
