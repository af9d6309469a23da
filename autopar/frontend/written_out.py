"""Writes out primitives that stand for a program of others, as JAX does when it compiles them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex

from autopar.frontend.compat import lowered_function, traced_beside

# Solves by a program of its own, and sums over a dim that vmap gave a name: JAX runs their
# implementations.
_BY_IMPLEMENTATION = ("custom_linear_solve",)
_OVER_NAMED_DIMS = ("psum", "pmax", "pmin")


def written_out(equation: Any, kept: Collection[str] = ()) -> Any | None:
    """The closed jaxpr that a jaxpr's equation stands for; None where it is to stay as it is.

    Written out are a loop that vmap lets end at a trip of its own for each row, a linear solve, a
    reduction over a dim that vmap gave a name, and what is none of JAX's own primitives and
    compiles as a JAX function. Primitives named in `kept` stay.
    """
    fun = None if equation.primitive.name in kept else _meaning(equation)
    return None if fun is None else traced_beside(equation, fun)


def _meaning(equation: Any) -> Callable[..., Any] | None:
    """The function of an equation's operands that computes the same."""
    primitive, params = equation.primitive, equation.params
    if primitive.name == "while":
        return _until_last_row(params) if _test(params).out_avals[0].shape else None
    named_dims = primitive.name in _OVER_NAMED_DIMS and _has_positions(params)
    if named_dims or primitive.name in _BY_IMPLEMENTATION:
        return lambda *operands: primitive.impl(*operands, **params)
    fun = lowered_function(primitive)
    return None if fun is None else lambda *operands: fun(*operands, **params)


def _has_positions(params: dict[str, Any]) -> bool:
    axes = params["axes"]
    return params.get("axis_index_groups") is None and all(isinstance(a, int) for a in axes)


def _test(params: dict[str, Any]) -> Any:
    return params["cond_jaxpr"]


def _until_last_row(params: dict[str, Any]) -> Callable[..., Any]:
    """The loop that goes on while any row does, and leaves rows that have ended as they are.

    It carries which rows go on. A row that has ended never goes on again, so the outcome is that
    of JAX's own form, which asks all rows anew each trip.
    """
    test, body = (jex.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    tests, consts = params["cond_nconsts"], params["body_nconsts"]

    def loop(*operands: Any) -> Sequence[Any]:
        of_test, of_body = operands[:tests], operands[tests : tests + consts]
        start = operands[tests + consts :]
        (goes_on,) = test(*of_test, *start)
        rows = tuple(range(goes_on.ndim))

        def trip(state: Sequence[Any]) -> list[Any]:
            goes_on, *held = state
            left = [
                lax.select(lax.broadcast_in_dim(goes_on, new.shape, rows), new, old)
                for new, old in zip(body(*of_body, *held), held, strict=True)
            ]
            (goes_on_still,) = test(*of_test, *left)
            return [lax.bitwise_and(goes_on, goes_on_still), *left]

        _, *found = lax.while_loop(
            lambda state: lax.reduce_or(state[0], rows), trip, [goes_on, *start]
        )
        return found

    return loop
