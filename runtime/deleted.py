"""Refuses arrays whose memory is gone: a program that is given one may kill the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import ArgumentError, listing
from autopar.frontend.plain_data import type_of
from autopar.frontend.trace.arguments import Argument, StepSpec, leaf_paths
from autopar.frontend.traced import TracedStep

_SHOWN = 4  # arrays that a message names


def deleted(leaves: Sequence[Any]) -> list[int]:
    """The numbers of leaves that were consumed or deleted; what is on the host never is."""
    return [i for i, leaf in enumerate(leaves) if getattr(leaf, "is_deleted", bool)()]


def deleted_arguments(
    spec: StepSpec, arguments: Sequence[Argument], traced: TracedStep | None, donate: bool
) -> ArgumentError:
    """The error of a call with deleted arrays among its arguments.

    `traced` is the step if it was traced for such arguments before, which tells what is state.
    """
    paths, leaves = leaf_paths(arguments), jax.tree_util.tree_leaves([a.tree for a in arguments])
    gone = deleted(leaves)
    is_state = traced is None or not set(gone).isdisjoint(traced.consumed_inputs)
    remedy = (
        f"A step consumes the state that it is given: go on with the state that {spec.name} "
        "returned, or keep the old one alive, at the price of its memory, with "
        "parallelize(..., donate=False)."
        if donate and is_state
        else f"{spec.name} does not consume them: a jax.jit that donates them has, or .delete(). "
        "Pass arrays that are alive."
    )
    faults = [f"{paths[i]} {_type_text(leaves[i])}" for i in gone]
    return _error(f"{spec.name} was given arrays that are deleted:", faults, remedy)


def check_closed_over(held: Sequence[tuple[str, Any]], traced: TracedStep) -> None:
    """Raise ArgumentError where an array that a step closes over, with its path, is deleted."""
    gone = deleted([array for _, array in held])
    if not gone:
        return
    faults = [_closed_over(*held[i], traced) for i in gone]
    remedy = (
        "Another function consumed them, such as a step that was given them as its state. Close "
        "over copies (jnp.copy), or pass them as arguments."
    )
    raise _error(f"{traced.name} closes over arrays that are deleted:", faults, remedy)


def _closed_over(path: str, array: Any, traced: TracedStep) -> str:
    names = {i.path: i.value.name for i in traced.graph.inputs}
    readers = (op for op in traced.graph.walk() if names.get(path) in op.operands)
    line = next((op.origin.line for op in readers if op.origin.line), "")
    return f"{path} {_type_text(array)}" + (f", read at {line}" if line else "")


def _type_text(array: Any) -> str:
    shape, dtype = type_of(array)
    return f"{dtype}[{','.join(map(str, shape))}]"


def _error(headline: str, faults: list[str], remedy: str) -> ArgumentError:
    more = len(faults) - _SHOWN
    shown = [*faults[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return ArgumentError(listing(headline, shown, remedy))
