"""Data parallel recipes: every axis splits the batch, parameters are whole everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.mesh import MeshShape
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.needs import Choice
from autopar.passes.shard.recipes.base import AbstractRecipe, Choices
from autopar.passes.shard.recipes.view import Test, View


@dataclass(frozen=True)
class DataParallel(AbstractRecipe):
    """Data parallelism: all axes split the batch; parameters and optimizer state are replicated."""

    name: ClassVar[str] = "dp"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Batch on every axis, nothing else sharded."""
        view = View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(choices, store=lambda d: view.whole, work=lambda d: view.unsharded)


@dataclass(frozen=True)
class Zero1(AbstractRecipe):
    """Data parallel with the optimizer state sharded; gradients are all-reduced."""

    name: ClassVar[str] = "zero1"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Optimizer state on every axis; parameters and gradients whole."""
        view = View.of(self.name, reading, mesh, mesh.names)

        def work(index: int) -> Test:
            backward = reading.decisions[index].region != "update"
            return view.unsharded if backward else view.anything

        return view.narrowed(choices, store=view.sharded_optimizer, work=work)


@dataclass(frozen=True)
class Zero2(AbstractRecipe):
    """Data parallel with optimizer state and gradients sharded: gradients are reduce-scattered."""

    name: ClassVar[str] = "zero2"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Optimizer state on every axis; gradients free to lie as it does."""
        view = View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(choices, store=view.sharded_optimizer, work=lambda d: view.anything)
