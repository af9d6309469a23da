"""The contract of a recipe: it narrows each decision's choices; the solver takes what is left."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.sharding import MeshShape
from autopar.passes.shard.model.decisions import Choice, Reading

Choices = Sequence[tuple[Choice, ...]]  # of each decision


@dataclass(frozen=True)
class AbstractRecipe(abc.ABC):
    """Narrows the choices of a reading's decisions."""

    name: ClassVar[str]

    @abc.abstractmethod
    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Choices that agree with the recipe; a decision that none would be left to keeps all.

        Raises InfeasibleError where the recipe makes no sense for this step on this mesh.
        """

    def suits(self, reading: Reading) -> bool:
        """True if there is something in a step, or a part of one, that the recipe is for."""
        del reading
        return True

    @property
    def of_parts(self) -> AbstractRecipe:
        """The recipe for the parts of a step that it suits, though it may not suit each of them."""
        return self


@dataclass(frozen=True)
class Free(AbstractRecipe):
    """No restriction: the whole space."""

    name: ClassVar[str] = "auto"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """The choices as they are."""
        del reading, mesh
        return list(choices)
