"""The textbook strategies, as restrictions of the space that the solver searches.

A recipe narrows each decision's choices; what it leaves open is still solved. Data axes carry
the batch; Megatron keeps the mesh's last axis for the features of weights and heads.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import InfeasibleError, InputError
from autopar.ir.assignment import Assignment
from autopar.ir.mesh import MeshShape
from autopar.passes.shard.batches import BatchTags, tag_batch
from autopar.passes.shard.decisions import Decision, DecisionKind, Reading
from autopar.passes.shard.needs import Choice
from autopar.passes.shard.weights import Weights, find_weights

Test = Callable[[Choice], bool]
REPLICATED, PARTIAL = -1, -2
_ATTENTION_RANK = 4  # batch, heads, positions, features


@dataclass(frozen=True)
class AbstractRecipe(abc.ABC):
    """Narrows the choices of a reading's decisions."""

    name: ClassVar[str]

    @abc.abstractmethod
    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Choices that agree with the recipe; a decision that none would be left to keeps all."""


@dataclass(frozen=True)
class Free(AbstractRecipe):
    """No restriction: the whole space."""

    name: ClassVar[str] = "auto"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Everything."""
        del reading, mesh
        return list(choices)


@dataclass(frozen=True)
class DataParallel(AbstractRecipe):
    """Every axis splits the batch; parameters and optimizer state are whole everywhere."""

    name: ClassVar[str] = "dp"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Batch on every axis, nothing else sharded."""
        view = _View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(choices, store=lambda d: view.whole, work=lambda d: view.unsharded)


@dataclass(frozen=True)
class Zero1(AbstractRecipe):
    """Data parallel with the optimizer state sharded; gradients are all-reduced."""

    name: ClassVar[str] = "zero1"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Optimizer state on every axis; parameters and gradients whole."""
        view = _View.of(self.name, reading, mesh, mesh.names)

        def work(index: int) -> Test:
            backward = reading.decisions[index].region != "update"
            return view.unsharded if backward else view.anything

        return view.narrowed(choices, store=view.sharded_optimizer, work=work)


@dataclass(frozen=True)
class Zero2(AbstractRecipe):
    """Data parallel with optimizer state and gradients sharded: gradients are reduce-scattered."""

    name: ClassVar[str] = "zero2"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Optimizer state on every axis; gradients free to lie as it does."""
        view = _View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(choices, store=view.sharded_optimizer, work=lambda d: view.anything)


@dataclass(frozen=True)
class FullySharded(AbstractRecipe):
    """ZeRO-3: parameters, gradients and optimizer state sharded, gathered where they are used."""

    name: ClassVar[str] = "fsdp"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """All state on every axis, as far as it divides."""
        view = _View.of(self.name, reading, mesh, mesh.names)
        return view.narrowed(
            choices,
            store=lambda d: view.most_sharded(choices[d]),
            work=lambda d: view.anything,
        )


@dataclass(frozen=True)
class Megatron(AbstractRecipe):
    """Tensor parallel over the last axis, data parallel over the others."""

    name: ClassVar[str] = "megatron"

    def restrict(
        self, reading: Reading, choices: Sequence[tuple[Choice, ...]], mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Every product with a weight splits features over the last axis; attention splits heads.

        Raises InfeasibleError where the heads of an attention do not divide by that axis.
        """
        model = mesh.names[-1]
        view = _View.of(self.name, reading, mesh, mesh.names[:-1])
        heads = dict(_heads(reading, view, mesh, model))

        def work(index: int) -> Test:
            if index in heads:
                return lambda c: view.at(c, model) == heads[index]
            if index in view.weights.readers:
                return lambda c: view.at(c, model) in view.weights.readers[index]
            return lambda c: (
                not isinstance(c, Assignment) or view.at(c, model) != view.factor(index)
            )

        return view.narrowed(choices, store=lambda d: view.off(view.batch_axes), work=work)


RECIPES: Mapping[str, AbstractRecipe] = {
    r.name: r for r in (Free(), DataParallel(), Zero1(), Zero2(), FullySharded(), Megatron())
}


def recipe_named(name: str) -> AbstractRecipe:
    """A recipe by name; raises InputError naming those that there are."""
    if name not in RECIPES:
        raise InputError(f"method {name!r} is unknown; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


@dataclass(frozen=True)
class _View:
    """A reading seen by a recipe: which axes carry the batch, and where it is."""

    reading: Reading
    mesh: MeshShape
    batch_axes: tuple[str, ...]
    tags: BatchTags
    weights: Weights

    @classmethod
    def of(cls, name: str, reading: Reading, mesh: MeshShape, axes: tuple[str, ...]) -> _View:
        tags = tag_batch(reading.graph)
        count = mesh.size(axes)
        if tags.size is not None and tags.size % count:
            raise InfeasibleError(
                f"{name} splits the batch over {' x '.join(f'{a}={mesh.size((a,))}' for a in axes)}"
                f" = {count} devices, but the batch is {tags.size} ({tags.path}), which does not "
                f"divide by {count}. Use a batch that is a multiple of {count}, a smaller mesh, or "
                "method='auto', which may shard other dims."
            )
        return cls(reading, mesh, axes, tags, find_weights(reading))

    # -- tests on choices --------------------------------------------------------------------

    def at(self, choice: Choice, axis: str) -> int:
        """What an axis does in a choice: the dim or factor that it splits, or -1, or -2."""
        if isinstance(choice, Assignment):
            return choice.factors[self.mesh.names.index(axis)]
        if axis in choice.partial:
            return PARTIAL
        return next((d for d, axes in enumerate(choice.dims) if axis in axes), REPLICATED)

    @property
    def whole(self) -> Test:
        """Neither sharded nor partial."""
        return lambda c: all(self.at(c, a) == REPLICATED for a in self.mesh.names)

    @property
    def unsharded(self) -> Test:
        """No dim split by a batch axis; a partial sum is fine."""
        return self.off(self.batch_axes)

    @property
    def anything(self) -> Test:
        """No restriction."""
        return lambda c: True

    def off(self, axes: Sequence[str]) -> Test:
        """No dim or factor split by any of these axes, but a partial sum is fine."""
        return lambda c: all(self.at(c, a) < 0 for a in axes)

    def most_sharded(self, choices: Sequence[Choice]) -> Test:
        """Split over as many devices as any choice."""

        def count(c: Choice) -> int:
            return self.mesh.size([a for a in self.mesh.names if self.at(c, a) >= 0])

        most = max(map(count, choices))
        return lambda c: count(c) == most

    def sharded_optimizer(self, index: int) -> Test:
        """Optimizer state as sharded as it divides, parameters whole."""
        if index in self.weights.parameters:
            return self.whole
        value = self.reading.decisions[index].value
        assert value is not None
        mesh = self.mesh
        able = [n for n in value.shape if n % mesh.device_count == 0]
        if not able:
            return self.anything
        return lambda c: (
            mesh.size([a for a in mesh.names if self.at(c, a) >= 0]) == mesh.device_count
        )

    # -- narrowing -----------------------------------------------------------------------------

    def narrowed(
        self,
        choices: Sequence[tuple[Choice, ...]],
        store: Callable[[int], Test],
        work: Callable[[int], Test],
    ) -> list[tuple[Choice, ...]]:
        """Batch where the batch is; `store` for state, `work` for the rest and for other axes."""
        return [
            _kept(options, self._tests(i, decision, store, work))
            for i, (decision, options) in enumerate(
                zip(self.reading.decisions, choices, strict=True)
            )
        ]

    def _tests(
        self,
        index: int,
        decision: Decision,
        store: Callable[[int], Test],
        work: Callable[[int], Test],
    ) -> Iterator[Test]:
        if decision.kind is DecisionKind.INPUT and index in self.weights.state:
            yield store(index)
            return
        carried = self.factor(index)
        if carried is None:
            yield work(index)
            return
        yield lambda c: all(self.at(c, a) == carried for a in self.batch_axes)
        if set(self.batch_axes) != set(self.mesh.names):
            yield work(index)

    def factor(self, index: int) -> int | None:
        """The dim or factor of a decision that carries the batch."""
        decision = self.reading.decisions[index]
        if decision.op is not None:
            return self.tags.factor(decision.op)
        return self.tags.dim(decision.value.name) if decision.value is not None else None


def _kept(options: tuple[Choice, ...], tests: Iterator[Test]) -> tuple[Choice, ...]:
    for test in tests:
        left = tuple(c for c in options if test(c))
        options = left or options
    return options


def _heads(reading: Reading, view: _View, mesh: MeshShape, model: str) -> Iterator[tuple[int, int]]:
    """Attention products, which have no weight, and the factor of each that is its heads."""
    for index, decision in enumerate(reading.decisions):
        op = decision.op
        if op is None or op.kind != "dot_general" or index in view.weights.readers:
            continue
        assert op.rule is not None
        lhs, rhs = op.rule.operands
        if len(lhs) > _ATTENTION_RANK:
            continue  # grouped queries: which of the two head dims to split is left open
        batch = view.factor(index)
        shared = [
            f for dim in lhs for f in dim
            if any(f in other for other in rhs)
            and any(f in out for out in op.rule.results[0])
            and f != batch and op.rule.factors[f].size > 1
        ]  # fmt: skip
        if not shared:
            continue
        size = mesh.size((model,))
        able = [f for f in shared if op.rule.factors[f].size % size == 0]
        if not able:
            heads = " x ".join(str(op.rule.factors[f].size) for f in shared)
            raise InfeasibleError(
                f"megatron splits attention heads over {model}={size}, but the product at "
                f"{op.origin.line or op.origin.module} has {heads} heads, which do not divide by "
                f"{size}. Use a {model} axis that divides {heads}, another number of heads, or "
                "method='auto', which may split other dims."
            )
        yield index, able[0]
