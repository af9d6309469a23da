"""The choices of a decision, and the shardings that a reader's choice needs of what it reads.

A choice is a sharding of a group, or mesh axes given to an op's factors. Needs go through ops that
are made where they are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.ir.rule import Kind, Rule
from autopar.ir.sharding import Assignment, MeshShape, Sharding, operand_of_result
from autopar.ir.values import Value
from autopar.passes.shard.model.decisions import (
    Decision,
    DecisionKind,
    Place,
    Read,
    ReadKind,
    Rematerializable,
    Standing,
)


def op_choices(rule: Rule, mesh: MeshShape) -> tuple[Assignment, ...]:
    """The ways to give axes to shardable factors that divide evenly."""
    able = rule.shardable() if rule.known else ()
    found: list[Assignment] = []
    for factors in itertools.product((-1, *able), repeat=len(mesh.names)):
        shares: dict[int, int] = {}
        for f, size in zip(factors, mesh.sizes, strict=True):
            if f >= 0:
                shares[f] = shares.get(f, 1) * size
        divides = all(rule.factors[f].size % n == 0 for f, n in shares.items())
        combiners = {
            rule.factors[f].combiner for f in shares if rule.factors[f].kind is Kind.REDUCE
        }
        if divides and len(combiners) <= 1:
            found.append(Assignment(factors))
    return tuple(found)


def group_choices(decision: Decision, mesh: MeshShape) -> tuple[Sharding, ...]:
    """The shardings that divide the group's dims, with partial sums if it may be one."""
    if decision.fixed is not None:
        return tuple(_kept(decision, mesh))
    partial = decision.may_be_partial and decision.kind in (DecisionKind.GROUP, DecisionKind.PORT)
    return tuple(canonical_shardings(decision.sizes, mesh, partial))


def canonical_shardings(sizes: Sequence[int], mesh: MeshShape, partial: bool) -> Iterator[Sharding]:
    """Shardings with the axes of each dim in mesh order; whole first."""
    places = [-1, *(d for d, n in enumerate(sizes) if n > 1)] + ([-2] if partial else [])
    for given in itertools.product(places, repeat=len(mesh.names)):
        dims = tuple(
            tuple(a for a, p in zip(mesh.names, given, strict=True) if p == d)
            for d in range(len(sizes))
        )
        if all(n % mesh.size(axes) == 0 for n, axes in zip(sizes, dims, strict=True)):
            left = tuple(a for a, p in zip(mesh.names, given, strict=True) if p == -2)
            yield Sharding(dims, left)


def _kept(decision: Decision, mesh: MeshShape) -> Iterator[Sharding]:
    """Fixed dims as they were given, in their own order of axes; open dims (None) are free.

    Open dims get the axes that no fixed dim uses.
    """
    fixed = decision.fixed or ()
    taken = {a for axes in fixed for a in axes or ()}
    sizes = [n if axes is None else 1 for n, axes in zip(decision.sizes, fixed, strict=True)]
    for sharding in canonical_shardings(sizes, mesh, False):
        if taken.isdisjoint(sharding.axes()):
            dims = zip(fixed, sharding.dims, strict=True)
            yield Sharding(tuple(free if axes is None else axes for axes, free in dims))


# -- what a reader's choice needs ------------------------------------------------------------------


Choice = Sharding | Assignment


def required(read: Read, choices: Sequence[Choice], mesh: MeshShape) -> tuple[Sharding, ...]:
    """For each choice of the reader, the sharding in which it reads the value."""
    return tuple(_required(read, choice, mesh) for choice in choices)


def _required(read: Read, choice: Choice, mesh: MeshShape) -> Sharding:
    if isinstance(choice, Assignment):
        assert read.op is not None
        assert read.op.rule is not None
        return choice.operand_sharding(read.op.rule, read.operand, mesh)
    if read.kind is ReadKind.EXACT:
        return Place(read.reader, read.dims).sharding(choice)
    assert read.op is not None
    assert read.op.rule is not None
    result = Place(read.reader, read.dims).sharding(choice)
    return operand_of_result(read.op.rule, read.operand, result, read.partial_ok)


def sources(
    standing: Standing, value: Value, wanted: Sequence[Sharding]
) -> Iterator[tuple[Value, Place, tuple[Sharding, ...]]]:
    """The placed values that a need comes down to, and the shardings asked of each.

    A value made on demand asks its own operands for what its sharding implies; a partial sum
    of it is made by masking, so its operands are asked for no partial sums.
    """
    if isinstance(standing, Place):
        yield value, standing, tuple(wanted)
    elif isinstance(standing, Rematerializable):
        rule = standing.op.rule
        assert rule is not None
        for i, inner in enumerate(standing.operands):
            if inner is not None:
                asked = tuple(operand_of_result(rule, i, s, False) for s in wanted)
                yield from sources(inner, standing.operand_values[i], asked)
