"""Products that a step writes twice, of the same values, and makes once.

A model that is called twice in a step, for its loss and for a metric or by two losses, is written
twice in the trace. Compilers merge equal instructions only where they are equal once sharded; here
one is planned:

    a = x @ w    b = tanh(a)    c = b @ v        a = x @ w    b = tanh(a)    c = b @ v
    a' = x @ w   b' = tanh(a')  c' = b' @ v  ->               b' = tanh(a)            c' is c

An exported plan has this file's code in it: it asks for nothing but JAX and NumPy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# ---- products that are written twice ----

# Cheap values that each layer makes for itself, such as masks, would tie all layers to the first.
PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")


class Looked(NamedTuple):
    """An equation as it is looked at: operands are numbers of values, or what is written into it.

    One that `stays` has bodies or effects, or is a barrier.
    """

    name: str
    params: dict[str, Any]
    operands: Sequence[Any]
    results: Sequence[int]
    avals: Sequence[Any]
    is_backward: bool
    stays: bool


def made_before(equations: Sequence[Looked]) -> dict[int, int]:
    """For each value that a product makes again: the first one that is the same.

    Equal are equations of one primitive with the same parameters, on equal values. Forward and
    backward passes share nothing, as with `jax.checkpoint`; nor do a pass and one that comes after
    its update, of which microbatches make a loop of its own.
    """
    met: dict[object, Looked] = {}  # primitive and operands -> the first one that has them
    first: dict[object, Sequence[int]] = {}  # all that an equation does -> what it first made
    equal: dict[int, int] = {}  # a value -> the first one that equals it
    same: dict[int, int] = {}
    later: set[int] | None = None
    for looked in equations:
        # 1. Few have an equal: most are told apart by little.
        little = (looked.name, *(equal.get(o, o) for o in looked.operands if isinstance(o, int)))
        other = met.setdefault(little, looked)
        if other is looked or other.stays or looked.stays:
            continue
        first.setdefault(_does(other, equal), other.results)
        made = first.setdefault(_does(looked, equal), looked.results)
        if made is looked.results:
            continue
        # 2. What is equal makes equal values; of products those of the first are taken, but for a
        #    pass that comes later.
        pairs = dict(zip(looked.results, made, strict=True))
        equal.update(pairs)
        if looked.name in PRODUCTS:
            later = _read_by_later_passes(equations) if later is None else later
            same.update(pairs if later.isdisjoint(looked.results) else {})
    return same


def _does(looked: Looked, equal: dict[int, int]) -> object:
    """A key of all that an equation does."""
    operands = [equal.get(o, o) if isinstance(o, int) else _bits(o) for o in looked.operands]
    params = sorted((name, _plain(value)) for name, value in looked.params.items())
    types = [str(aval) for aval in looked.avals]
    return looked.name, looked.is_backward, repr((operands, params, types))


def _bits(written: Any) -> object:
    """A key of what is written into an equation: a number by its bits, an array by its identity."""
    kind = getattr(written, "aval", written.value)
    if kind.shape or jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended):
        return id(written.value)
    return str(kind.dtype), np.asarray(written.value, kind.dtype).tobytes()


def _plain(value: Any) -> str:
    """A parameter as text; what is more than numbers and names by its identity."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    is_plain = value is None or isinstance(value, bool | int | float | str | np.dtype)
    return repr(value) if is_plain else f"{type(value).__name__} {value} {id(value)}"


def _read_by_later_passes(equations: Sequence[Looked]) -> set[int]:
    """Values from which forward equations lead to a product with what a backward pass has made.

    So does what a generator makes, where the critic that reads it has been updated before.
    """
    backward: set[int] = set()  # made by a backward pass, or from what it made
    for looked in equations:
        if looked.is_backward or _any_of(looked.operands, backward):
            backward.update(looked.results)
    later: set[int] = set()
    for looked in reversed(equations):
        meets = looked.name in PRODUCTS and _any_of(looked.operands, backward)
        if not looked.is_backward and (meets or _any_of(looked.results, later)):
            later.update(o for o in looked.operands if isinstance(o, int))
    return later


def _any_of(operands: Iterable[Any], values: Collection[int]) -> bool:
    return any(isinstance(o, int) and o in values for o in operands)
