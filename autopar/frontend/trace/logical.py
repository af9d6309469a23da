"""The logical axis names that flax models give to their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.frontend.trace.arguments import StepSpec, dynamic_arguments, leaf_paths

LogicalNames = tuple[str | None, ...]


def logical_names(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, LogicalNames]:
    """The names of each array's dims by its path, for those that have any.

    They stand on flax's boxes (nn.Partitioned, nn.LogicallyPartitioned) and on nnx.Variables.
    """
    arguments = dynamic_arguments(spec, args, kwargs)
    found: list[LogicalNames | None] = []
    for argument in arguments:
        leaves = jax.tree_util.tree_leaves(
            argument.tree, is_leaf=lambda n: _names_of(n) is not None
        )
        for node in leaves:
            inside = jax.tree_util.tree_leaves(node)
            found += [_names_of(node) if len(inside) == 1 else None] * len(inside)
    pairs = zip(leaf_paths(arguments), found, strict=True)
    return {path: names for path, names in pairs if names is not None}


def _names_of(node: Any) -> LogicalNames | None:
    """The names on a box; `names` is flax.linen's word, the others are nnx's over time."""
    if jax.tree_util.all_leaves([node]):
        return None
    for word in ("names", "out_sharding", "sharding_names", "sharding"):
        held = getattr(node, word, None)
        if isinstance(held, tuple | list | PartitionSpec) and held:
            if all(name is None or isinstance(name, str) for name in held):
                return tuple(held)
    return None
