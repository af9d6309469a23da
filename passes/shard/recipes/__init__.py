"""The textbook strategies, as restrictions of the space that the solver searches."""

from autopar.passes.shard.recipes.recipe import AbstractRecipe as AbstractRecipe
from autopar.passes.shard.recipes.recipe import Free as Free
from autopar.passes.shard.recipes.table import RECIPES as RECIPES
from autopar.passes.shard.recipes.table import recipe_named as recipe_named
