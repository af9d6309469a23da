"""The slot of the batch pass: from a step traced on the whole batch and on a part, to its cut."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.batching import BatchGraphs, Batching
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractBatching(AbstractPass[BatchGraphs, Batching]):
    """Decides how the step is cut into microbatches."""
