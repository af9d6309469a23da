"""Tensor parallel recipes: the last axis splits the features of weights and the heads.

Megatron splits blocks. A product of the stream with a weight opens one and is split by the weight's
columns; a product of something inside with a weight closes it and is split by rows. Backward it is
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import InfeasibleError
from autopar.ir.graph import Op
from autopar.ir.sharding import MeshShape
from autopar.passes.shard.model.decisions import (
    Choice,
    Decision,
    DecisionKind,
    Place,
    Reading,
    ReadKind,
    Rematerializable,
    Standing,
)
from autopar.passes.shard.recipes.recipe import (
    PARTIAL,
    REPLICATED,
    AbstractRecipe,
    Choices,
    Slot,
    Test,
    View,
    need_axes,
    shared_factors,
    spread,
)

_ATTENTION_RANK = 4  # batch, heads, positions, features


@dataclass(frozen=True)
class Megatron(AbstractRecipe):
    """Tensor parallel over the last axis, data parallel over the others."""

    name: ClassVar[str] = "megatron"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Splits features of products with a weight over the last axis, and heads of attention.

        Raises InfeasibleError where the heads of an attention do not divide by that axis.
        """
        tensors = _Tensors.of(self.name, reading, mesh)
        view = tensors.view
        return view.narrowed(choices, lambda d: view.off(view.batch_axes), tensors.work)


@dataclass(frozen=True)
class SequenceParallel(AbstractRecipe):
    """Megatron with sequence parallelism: what lies between its blocks is split by position.

    Norms, dropout and the residual stream are cut along the sequence on the last axis, so that
    a block starts with an all-gather and ends with a reduce-scatter (Korthikanti et al., 2022).
    """

    name: ClassVar[str] = "sequence"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """As megatron, with a block's first products split by columns and its last by rows.

        Raises InfeasibleError as well where there is no sequence, or it does not divide.
        """
        tensors = _Tensors.of(self.name, reading, mesh)
        view, blocks = tensors.view, find_blocks(reading, tensors.view)
        _check_sequence(reading, blocks, mesh)

        def work(index: int) -> Test:
            if index in tensors.heads:
                return tensors.work(index)
            if index in blocks.features:
                wanted = blocks.features[index]
            elif index in blocks.positions:
                wanted = blocks.positions[index] | {PARTIAL}  # sums of sums are scattered once
            else:
                return tensors.work(index)
            return view.placed({tensors.model: wanted})

        return view.narrowed(choices, lambda d: view.off(view.batch_axes), work)


@dataclass(frozen=True)
class ShardedTensors(AbstractRecipe):
    """FSDP over all axes but the last, which is tensor parallel as in megatron."""

    name: ClassVar[str] = "fsdp+tp"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """As megatron, with weights split over all axes and other state over the batch's.

        Raises InfeasibleError as well on a mesh of one axis, where there is only one of the two.
        """
        need_axes(self.name, mesh, "shards over the first axes and splits tensors over the last")
        tensors = _Tensors.of(self.name, reading, mesh)
        view = tensors.view

        def store(index: int) -> Test:
            wide = len(reading.decisions[index].sizes) > 1  # else a norm's scale, a bias
            return view.most_sharded(choices[index], mesh.names if wide else view.batch_axes)

        return view.narrowed(choices, store, tensors.work)


@dataclass(frozen=True)
class _Tensors:
    """The use of the last axis: the heads' factor of each attention product, weights' features."""

    view: View
    model: str
    heads: dict[int, int]

    @classmethod
    def of(cls, name: str, reading: Reading, mesh: MeshShape) -> _Tensors:
        view = View.of(name, reading, mesh, mesh.names[:-1])
        model = mesh.names[-1]
        return cls(view, model, dict(_heads(name, reading, view, model)))

    def work(self, index: int) -> Test:
        """Heads for attention, features for weights; elsewhere the axis stays off the batch."""
        view, model = self.view, self.model
        if index in self.heads:
            return view.placed({model: (self.heads[index],)})
        if index in view.weights.readers:
            return view.placed({model: view.weights.readers[index]})
        factor, op = view.factor(index), view.reading.decisions[index].op
        if factor is None or op is None or op.rule is None:
            return view.anything
        others = {REPLICATED, *range(len(op.rule.factors))} - {factor}
        return view.placed({model: others})


def _heads(name: str, reading: Reading, view: View, model: str) -> Iterator[tuple[int, int]]:
    """Attention products, which have no weight, and the factor of each that is its heads."""
    size = view.mesh.size((model,))
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
        able = [f for f in shared if op.rule.factors[f].size % size == 0]
        if not able and len(op.rule.results[0]) > _ATTENTION_RANK:
            continue  # fewer heads of keys than devices: as above
        if not able:
            heads = " x ".join(str(op.rule.factors[f].size) for f in shared)
            raise InfeasibleError(
                f"{name} splits attention heads over {model}={size}, but the product at "
                f"{op.origin.line or op.origin.module} has {heads} heads, which do not divide by "
                f"{size}. Use a {model} axis that divides {heads}, another number of heads, or "
                "method='auto', which may split other dims."
            )
        yield index, able[0]


def _check_sequence(reading: Reading, blocks: Blocks, mesh: MeshShape) -> None:
    model, size = mesh.names[-1], mesh.sizes[-1]
    if not blocks.seeds:
        raise InfeasibleError(
            "sequence splits activations along a sequence, but this step has none. No product with "
            "a weight has a dim for it beside batch and features. Use method='megatron', or "
            "method='auto', which may split other dims."
        )
    for index, factor in blocks.seeds:
        op = reading.decisions[index].op
        assert op is not None
        assert op.rule is not None
        length = op.rule.factors[factor].size
        if length % size:
            raise InfeasibleError(
                f"sequence splits the sequence over {model}={size}, but at the product at "
                f"{op.origin.line or op.origin.module} it has {length} positions, which do not "
                f"divide by {size}. Use a {model} axis that divides {length}, another length, or "
                "method='megatron'."
            )


# -- the blocks of a model -------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Positions of decisions between blocks; features that the last axis splits in products.

    `seeds` are the products with a weight and the factor of each that is the sequence.
    """

    seeds: tuple[Slot, ...]
    positions: Mapping[int, frozenset[int]]
    features: Mapping[int, frozenset[int]]


def find_blocks(reading: Reading, view: View) -> Blocks:
    """The blocks of a step, in the order in which its decisions are made."""
    seeds = tuple(
        (index, factor)
        for index in sorted(view.weights.readers)
        if (factor := _sequence(reading, view, index)) is not None
    )
    slots = spread(reading, seeds)
    sources = _sources(reading)
    inside: set[int] = set()
    positions: dict[int, frozenset[int]] = {}
    features: dict[int, frozenset[int]] = {}
    for index, decision in enumerate(reading.decisions):
        entered = any(s in inside for s in sources.get(index, ()) if s < index)
        if index in view.weights.readers:
            assert decision.op is not None
            features[index] = _features(decision.op, view.weights.readers[index], entered)
            entered = not entered
        if entered:
            inside.add(index)
        elif index in slots and _follows(decision, sources.get(index, ()), positions):
            positions[index] = slots[index] - {view.factor(index)}
    return Blocks(seeds, positions, features)


def _follows(decision: Decision, sources: Sequence[int], stream: Mapping[int, object]) -> bool:
    """True if a decision is part of the stream: groups of numbers, and ops on nothing else."""
    if decision.op is not None:
        return bool(sources) and all(s in stream for s in sources)
    assert decision.value is not None
    return decision.kind is not DecisionKind.INPUT and decision.value.is_floating


def _sources(reading: Reading) -> dict[int, list[int]]:
    """The decisions that feed each decision."""
    found: dict[int, list[int]] = {}
    for read in reading.reads:
        for home in _homes(read.standing):
            made = read.kind is ReadKind.OP and read.operand < 0
            target, source = (home, read.reader) if made else (read.reader, home)
            found.setdefault(target, []).append(source)
    return found


def _homes(standing: Standing) -> Iterator[int]:
    if isinstance(standing, Place):
        yield standing.decision
    elif isinstance(standing, Rematerializable):
        for inner in standing.operands:
            yield from _homes(inner)


def _features(op: Op, weight: frozenset[int], rows: bool) -> frozenset[int]:
    """The factors of a weight that are summed over (its rows), or that are left (its columns)."""
    assert op.rule is not None
    left = {f for dim in op.rule.results[0] for f in dim}
    return frozenset(f for f in weight if (f not in left) == rows)


def _sequence(reading: Reading, view: View, index: int) -> int | None:
    """The first factor of a product that is neither the batch nor in its weight."""
    op = reading.decisions[index].op
    assert op is not None
    assert op.rule is not None
    if op.kind != "dot_general":
        return None
    batch, weight = view.factor(index), view.weights.readers[index]
    if shared_factors(op) & weight:
        return None  # a weight for each expert: what else is there are its slots
    for dim in op.rule.results[0]:
        factor = op.rule.major(dim)
        if factor is not None and factor != batch and factor not in weight:
            return factor
    return None
