"""Pieces of hand-written kernels: a device runs the part of the grid that its pieces are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.frontend.trace.kernels import dims_apart, on_pieces
from autopar.frontend.traced import Equation
from autopar.runtime.local.base import Local, LocalRun
from autopar.runtime.local.rebind import rebind


def _pallas_call(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The kernel over fewer blocks."""
    laid = (*local.operands, *local.results)
    shards = {
        (tensor, dim, block): local.mesh.size(laid[tensor].dims[dim])
        for places in dims_apart(equation).values()
        for tensor, dim, block in places
    }
    return rebind(equation, operands, **(on_pieces(equation, shards) if shards else {}))


RUNS: Mapping[str, LocalRun] = {"pallas_call": _pallas_call}
