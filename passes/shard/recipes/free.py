"""No recipe at all: every choice is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.mesh import MeshShape
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.needs import Choice
from autopar.passes.shard.recipes.base import AbstractRecipe, Choices


@dataclass(frozen=True)
class Free(AbstractRecipe):
    """No restriction: the whole space."""

    name: ClassVar[str] = "auto"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Everything."""
        del reading, mesh
        return list(choices)
