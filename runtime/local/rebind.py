"""Running an equation's primitive on pieces, some of its parameters replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontend.traced import Equation
from autopar.runtime.local.base import Local

# Shardings in parameters speak of the user's mesh; inside the program there is none.
_SHARDINGS = ("out_sharding", "sharding")


def rebind(equation: Equation, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The primitive's results on these operands, as a list."""
    params = {**equation.params, **changed}
    params.update(dict.fromkeys((name for name in _SHARDINGS if name in params), None))
    out = equation.primitive.bind(*operands, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def run_as_is(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The piece is computed by the same primitive with the same parameters."""
    del local
    return rebind(equation, operands)
