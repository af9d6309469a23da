"""Pieces of convolutions: a device may hold only some of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontend.traced import Equation
from autopar.runtime.local.base import Local, LocalRun
from autopar.runtime.local.rebind import rebind


def _conv(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Where there are groups, they are the major part of the sharded feature or batch dim."""
    batch_dim, feature_dim = equation.params["dimension_numbers"].lhs_spec[:2]
    counts: dict[str, int] = {}
    for name, dim in (("feature_group_count", feature_dim), ("batch_group_count", batch_dim)):
        groups = equation.params[name]
        shards = local.mesh.size(local.operands[0].dims[dim])
        counts[name] = groups // shards if groups > 1 else 1
    return rebind(equation, operands, **counts)


RUNS: dict[str, LocalRun] = {"conv_general_dilated": _conv}
