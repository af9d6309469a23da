"""Data parallel recipes: every axis splits the batch; parameters are whole, or cut up at rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.sharding import MeshShape
from autopar.passes.shard.model.decisions import Choice, Reading
from autopar.passes.shard.recipes.recipe import (
    REPLICATED,
    AbstractRecipe,
    Choices,
    Test,
    View,
    need_axes,
)


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


# -- parameters cut up at rest, gathered where they are used ---------------------------------------


@dataclass(frozen=True)
class FullySharded(AbstractRecipe):
    """ZeRO-3: parameters, gradients and optimizer state sharded, gathered where they are used."""

    name: ClassVar[str] = "fsdp"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Shards all state over all axes, as far as it divides."""
        view = View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(
            choices,
            store=lambda d: view.most_sharded(choices[d], mesh.names),
            work=lambda d: view.anything,
        )


@dataclass(frozen=True)
class HybridSharded(AbstractRecipe):
    """FSDP within the last axis, whose groups are replicas of each other: gathers stay inside."""

    name: ClassVar[str] = "hsdp"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Batch on every axis; state on the last only, gradients summed over the others.

        Raises InfeasibleError on a mesh of one axis, where it is fsdp.
        """
        need_axes(self.name, mesh, "replicates over the first axes and shards over the last")
        view = View.of(self.name, reading, mesh, mesh.names)
        outer, inner = mesh.names[:-1], mesh.names[-1:]
        whole = view.placed(dict.fromkeys(outer, (REPLICATED,)))

        def store(index: int) -> Test:
            most = view.most_sharded(choices[index], inner)
            return lambda c: most(c) and whole(c)

        return view.narrowed(choices, store=store, work=lambda d: view.off(outer))
