"""The slot of the layer pass: from a batched step to layers, consecutive runs of forward ops."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.batching import Batching
from autopar.ir.stages import LayerSequence
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractLayering(AbstractPass[Batching, LayerSequence]):
    """Groups ops into layers, the smallest pieces that stages are made of."""
