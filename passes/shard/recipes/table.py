"""The recipes by their names."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import InputError
from autopar.passes.shard.recipes.data import (
    DataParallel,
    FullySharded,
    HybridSharded,
    Zero1,
    Zero2,
)
from autopar.passes.shard.recipes.expert import ExpertParallel
from autopar.passes.shard.recipes.recipe import AbstractRecipe, Free
from autopar.passes.shard.recipes.tensor import Megatron, SequenceParallel, ShardedTensors

RECIPES: Mapping[str, AbstractRecipe] = {
    r.name: r
    for r in (
        Free(), DataParallel(), Zero1(), Zero2(), FullySharded(), HybridSharded(), Megatron(),
        SequenceParallel(), ShardedTensors(), ExpertParallel(),
    )
}  # fmt: skip


def recipe_named(name: str) -> AbstractRecipe:
    """A recipe by name; raises InputError naming those that there are."""
    if name not in RECIPES:
        raise InputError(f"method {name!r} is unknown; there are: {', '.join(RECIPES)}")
    return RECIPES[name]
