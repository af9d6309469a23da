"""Primitives that stand for a program of others, and the function that JAX compiles in their place.

An exported plan has this file's code in it: it asks for nothing but JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax
from jax.extend import core

# ---- what primitives stand for ----

# Call primitives that mean nothing to a planner, and the parameter that holds their jaxpr.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "xla_metadata_call": "jaxpr",
}
# Kept as ops with bodies. Inlining remat would let XLA undo it.
BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}

# Calls of functions that JAX compiles in line, and sums over what vmap gave a name.
_CALLING = ("composite", "custom_linear_solve", "linear_call", "remat_opt")
_SUMMING = ("psum", "pmax", "pmin")
_REDUCING = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")


def meaning(eqn: Any) -> Callable[..., Any] | None:
    """The function of an equation's operands that it stands for; None where it is to stay.

    It is one for a loop that vmap lets end at a trip of its own for each row, for calls such as a
    linear solve, a reduction over a dim that vmap gave a name or over none, and another package's
    primitive.
    """
    primitive, params = eqn.primitive, eqn.params
    if primitive.name == "while":
        has_rows = params["cond_jaxpr"].out_avals[0].shape
        return until_last_row(params) if has_rows else None
    if any(getattr(v.aval, "shape", None) is None for v in eqn.invars):
        return None
    if primitive.name == "call_hi_primitive":  # from JAX 0.12 on, implicit roots and expm are
        return lambda *operands: primitive.to_lojax(*operands, **params)
    if primitive.name in _REDUCING and not params["axes"]:
        return lambda operand: operand  # as JAX leaves a mean over the dims of a scalar
    over_rows = (
        primitive.name in _SUMMING
        and params.get("axis_index_groups") is None
        and all(isinstance(axis, int) for axis in params["axes"])
    )
    if over_rows or primitive.name in _CALLING or is_foreign(primitive):
        return lambda *operands: primitive.impl(*operands, **params)
    return None


def is_foreign(primitive: Any) -> bool:
    """True if a package other than JAX made the primitive, and can run it."""
    fun: Any = primitive.impl
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__module__", "jax")).partition(".")[0] not in ("jax", "jaxlib")


def until_last_row(params: dict[str, Any]) -> Callable[..., Any]:
    """The loop that goes on while any row does, and leaves rows that have ended as they are.

    It carries which rows go on. One that has ended would never go on again, so the outcome is that
    of JAX's own form, which asks all rows twice a trip.
    """
    test, body = (core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    tests, consts = params["cond_nconsts"], params["body_nconsts"]

    def loop(*operands: Any) -> Sequence[Any]:
        of_test, of_body = operands[:tests], operands[tests : tests + consts]
        start = operands[tests + consts :]
        (goes_on,) = test(*of_test, *start)
        rows = tuple(range(goes_on.ndim))

        def any_goes_on(state: Iterable[Any]) -> Any:
            goes_on, *_ = state
            return lax.reduce_or(goes_on, rows)

        def trip(state: Iterable[Any]) -> list[Any]:
            goes_on, *held = state
            left = [
                lax.select(lax.broadcast_in_dim(goes_on, old.shape, rows), new, old)
                for new, old in zip(body(*of_body, *held), held, strict=True)
            ]
            (still,) = test(*of_test, *left)
            return [lax.bitwise_and(goes_on, still), *left]

        _, *found = lax.while_loop(any_goes_on, trip, [goes_on, *start])
        return found

    return loop
