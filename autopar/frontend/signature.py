"""The arguments of a call, flat, and the signature that a trace depends on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from autopar.frontend.arguments import StepSpec, split_static


@dataclass(frozen=True)
class Call:
    """The arrays of a call in order, and what tells apart calls that trace differently."""

    leaves: tuple[Any, ...]
    signature: Hashable


def read_call(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Flatten a call's dynamic arguments; static ones are part of the signature as they are."""
    positional, named = split_static(spec, args, kwargs)
    leaves, tree = jax.tree_util.tree_flatten((positional, named))
    static = tuple((type(args[i]), args[i]) for i in spec.static(args)[0] if i < len(args))
    extra = tuple((k, type(v), v) for k, v in sorted(kwargs.items()) if k not in named)
    return Call(tuple(leaves), (tree, _types_of(leaves), static, extra))


def _types_of(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The type of each leaf; in one go where all are arrays, for this is done at every call."""
    try:
        return tuple([(leaf.shape, _canonical(leaf.dtype)) for leaf in leaves])
    except AttributeError:
        return tuple(map(_type_of, leaves))


def _type_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype as JAX will see them: a Python scalar is the array it becomes in a step.

    A count that starts as the number 0 so comes back from the first step with the same type.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return (), str(jax.dtypes.result_type(leaf))
    return tuple(leaf.shape), _canonical(dtype)


@lru_cache(maxsize=256)
def _canonical(dtype: Any) -> str:
    is_extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return str(dtype if is_extended else jax.dtypes.canonicalize_dtype(dtype))
